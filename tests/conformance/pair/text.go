package pair

import (
	"crypto/sha256"
	"fmt"
	"sort"
	"strconv"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// longBytes is the length from which bytes are shown by length and digest.
const longBytes = 160

// Text prints a message on one line, fields in number order, telling an absent message from an empty one. Unlike the text
// format of the protobuf module it is the same in every process.
func Text(message proto.Message) string {
	if message == nil {
		return "none"
	}
	var out strings.Builder
	writeMessage(&out, message.ProtoReflect())
	return out.String()
}

func writeMessage(out *strings.Builder, message protoreflect.Message) {
	var fields []protoreflect.FieldDescriptor
	message.Range(func(field protoreflect.FieldDescriptor, _ protoreflect.Value) bool {
		fields = append(fields, field)
		return true
	})
	sort.Slice(fields, func(i, j int) bool { return fields[i].Number() < fields[j].Number() })
	out.WriteByte('{')
	for i, field := range fields {
		if i > 0 {
			out.WriteByte(' ')
		}
		out.WriteString(string(field.Name()))
		out.WriteByte(':')
		value := message.Get(field)
		if !field.IsList() {
			writeValue(out, field, value)
			continue
		}
		out.WriteByte('[')
		for j := range value.List().Len() {
			if j > 0 {
				out.WriteByte(' ')
			}
			writeValue(out, field, value.List().Get(j))
		}
		out.WriteByte(']')
	}
	if unknown := message.GetUnknown(); len(unknown) > 0 {
		fmt.Fprintf(out, " unknown:%x", []byte(unknown))
	}
	out.WriteByte('}')
}

func writeValue(out *strings.Builder, field protoreflect.FieldDescriptor, value protoreflect.Value) {
	switch field.Kind() {
	case protoreflect.MessageKind:
		writeMessage(out, value.Message())
	case protoreflect.BytesKind:
		out.WriteString(Bytes(value.Bytes()))
	case protoreflect.StringKind:
		out.WriteString(Bytes([]byte(value.String())))
	case protoreflect.EnumKind:
		if known := field.Enum().Values().ByNumber(value.Enum()); known != nil {
			out.WriteString(string(known.Name()))
		} else {
			out.WriteString(strconv.Itoa(int(value.Enum())))
		}
	default:
		out.WriteString(value.String())
	}
}

// Bytes quotes a byte string, shortening long ones to length and digest.
func Bytes(value []byte) string {
	if len(value) < longBytes {
		return strconv.Quote(string(value))
	}
	return fmt.Sprintf("<%d bytes %x>", len(value), sha256.Sum256(value))
}
