// Package contract compares skeg's wire contract with the one that etcd ships.
//
// A contract is turned into facts: one line of text per message, field, oneof, enum, enum value,
// service and method, under its full name. Two contracts are the same when their facts are. Which
// file declares what, comments and options do not count, for none of them is on the wire.
package contract

import (
	"fmt"
	"sort"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// facts maps a full name to all that the wire, or generated code, sees of it.
type facts map[string]string

// factsOf collects the facts of some files.
func factsOf(files ...protoreflect.FileDescriptor) facts {
	all := facts{}
	for _, file := range files {
		all.addMessages(file.Messages())
		all.addEnums(file.Enums())
		all.addServices(file.Services())
	}
	return all
}

// differences lists, by name, what `got` lacks, has too much or declares otherwise than `want`.
func differences(want, got facts) []string {
	var found []string
	for name, fact := range want {
		if other, ok := got[name]; !ok {
			found = append(found, fmt.Sprintf("%s: missing, want %s", name, fact))
		} else if other != fact {
			found = append(found, fmt.Sprintf("%s: got %s, want %s", name, other, fact))
		}
	}
	for name, fact := range got {
		if _, ok := want[name]; !ok {
			found = append(found, fmt.Sprintf("%s: not in etcd, got %s", name, fact))
		}
	}
	sort.Strings(found)
	return found
}

func (f facts) addMessages(messages protoreflect.MessageDescriptors) {
	for i := range messages.Len() {
		message := messages.Get(i)
		f[string(message.FullName())] = fmt.Sprintf("message %s map_entry=%t",
			message.ParentFile().Syntax(), message.IsMapEntry())
		f.addFields(message.Fields())
		f.addOneofs(message.Oneofs())
		f.addEnums(message.Enums())
		f.addMessages(message.Messages())
	}
}

func (f facts) addFields(fields protoreflect.FieldDescriptors) {
	for i := range fields.Len() {
		field := fields.Get(i)
		typeName := ""
		if message := field.Message(); message != nil {
			typeName = " " + string(message.FullName())
		}
		if enum := field.Enum(); enum != nil {
			typeName = " " + string(enum.FullName())
		}
		oneof := ""
		if in := field.ContainingOneof(); in != nil {
			oneof = " oneof=" + string(in.Name())
		}
		f[string(field.FullName())] = fmt.Sprintf("field %d %s %s%s%s json=%s presence=%t packed=%t",
			field.Number(), field.Cardinality(), field.Kind(), typeName, oneof,
			field.JSONName(), field.HasPresence(), field.IsPacked())
	}
}

func (f facts) addOneofs(oneofs protoreflect.OneofDescriptors) {
	for i := range oneofs.Len() {
		oneof := oneofs.Get(i)
		var members []string
		for j := range oneof.Fields().Len() {
			members = append(members, string(oneof.Fields().Get(j).Name()))
		}
		sort.Strings(members)
		f[string(oneof.FullName())] = fmt.Sprintf("oneof of %s", strings.Join(members, ", "))
	}
}

func (f facts) addEnums(enums protoreflect.EnumDescriptors) {
	for i := range enums.Len() {
		enum := enums.Get(i)
		f[string(enum.FullName())] = fmt.Sprintf("enum closed=%t", enum.IsClosed())
		for j := range enum.Values().Len() {
			value := enum.Values().Get(j)
			name := enum.FullName().Append(value.Name())
			f[string(name)] = fmt.Sprintf("value %d", value.Number())
		}
	}
}

func (f facts) addServices(services protoreflect.ServiceDescriptors) {
	for i := range services.Len() {
		service := services.Get(i)
		f[string(service.FullName())] = "service"
		for j := range service.Methods().Len() {
			method := service.Methods().Get(j)
			f[string(method.FullName())] = fmt.Sprintf("rpc %s stream=%t -> %s stream=%t",
				method.Input().FullName(), method.IsStreamingClient(),
				method.Output().FullName(), method.IsStreamingServer())
		}
	}
}
