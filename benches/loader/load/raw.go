package load

import (
	"context"
	"fmt"
	"math"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

const (
	rangePath  = "/etcdserverpb.KV/Range"
	streamPath = "/etcdserverpb.KV/RangeStream"
	putPath    = "/etcdserverpb.KV/Put"
	txnPath    = "/etcdserverpb.KV/Txn"
	watchPath  = "/etcdserverpb.Watch/Watch"
)

// rawMessage is a message as it came.
type rawMessage []byte

// rawCodec encodes messages as usual and hands answers over undecoded.
type rawCodec struct{}

func (rawCodec) Name() string { return "proto" }

func (rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	message, ok := v.(proto.Message)
	if !ok {
		return nil, fmt.Errorf("%T is not a message", v)
	}
	encoded, err := proto.Marshal(message)
	return mem.BufferSlice{mem.SliceBuffer(encoded)}, err
}

func (rawCodec) Unmarshal(data mem.BufferSlice, v any) error {
	into, ok := v.(*rawMessage)
	if !ok {
		return fmt.Errorf("%T does not take bytes", v)
	}
	size := data.Len()
	if cap(*into) < size {
		*into = make([]byte, size)
	}
	*into = (*into)[:size]
	data.CopyTo(*into)
	return nil
}

func dial(address string) (*grpc.ClientConn, error) {
	return grpc.NewClient(address,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(rawCodec{}), grpc.MaxCallRecvMsgSize(math.MaxInt32)))
}

func call(ctx context.Context, conn *grpc.ClientConn, path string, request proto.Message) (rawMessage, error) {
	var answer rawMessage
	err := conn.Invoke(ctx, path, request, &answer)
	return answer, err
}

// eachField calls visit with the number of every field of a message, its bytes if it is length-delimited and its value if it
// is a varint.
func eachField(message []byte, visit func(number protowire.Number, text []byte, value uint64)) error {
	for len(message) > 0 {
		number, kind, size := protowire.ConsumeTag(message)
		if size < 0 {
			return protowire.ParseError(size)
		}
		message = message[size:]
		switch kind {
		case protowire.BytesType:
			text, size := protowire.ConsumeBytes(message)
			if size < 0 {
				return protowire.ParseError(size)
			}
			visit(number, text, 0)
			message = message[size:]
		case protowire.VarintType:
			value, size := protowire.ConsumeVarint(message)
			if size < 0 {
				return protowire.ParseError(size)
			}
			visit(number, nil, value)
			message = message[size:]
		default:
			size := protowire.ConsumeFieldValue(number, kind, message)
			if size < 0 {
				return protowire.ParseError(size)
			}
			message = message[size:]
		}
	}
	return nil
}

// listing is what a load needs of a RangeResponse.
type listing struct {
	keys     int
	lastKey  []byte
	more     bool
	count    int64
	revision int64
}

// readListing walks a RangeResponse: header 1, kvs 2, more 3, count 4.
func readListing(message []byte) (listing, error) {
	var seen listing
	var last []byte
	err := eachField(message, func(number protowire.Number, text []byte, value uint64) {
		switch number {
		case 1:
			seen.revision = int64(fieldValue(text, 3))
		case 2:
			seen.keys++
			last = text
		case 3:
			seen.more = value != 0
		case 4:
			seen.count = int64(value)
		}
	})
	if err == nil && last != nil {
		seen.lastKey = fieldBytes(last, 1)
	}
	return seen, err
}

// fieldBytes returns the first length-delimited field of that number, nil if there is none.
func fieldBytes(message []byte, wanted protowire.Number) []byte {
	var found []byte
	_ = eachField(message, func(number protowire.Number, text []byte, _ uint64) {
		if number == wanted && found == nil {
			found = text
		}
	})
	return found
}

// fieldValue returns the last varint field of that number, 0 if there is none.
func fieldValue(message []byte, wanted protowire.Number) uint64 {
	var found uint64
	_ = eachField(message, func(number protowire.Number, _ []byte, value uint64) {
		if number == wanted {
			found = value
		}
	})
	return found
}
