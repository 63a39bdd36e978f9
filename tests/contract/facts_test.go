package contract

import (
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
)

func TestAContractEqualsItself(t *testing.T) {
	for _, file := range etcdFiles(t) {
		if found := compareChanged(t, file, func(*descriptorpb.FileDescriptorProto) {}); len(found) > 0 {
			t.Errorf("%s differs from itself: %v", file.Path(), found)
		}
	}
}

// Each case plants one bug in etcd's own contract; the comparison must name it, and nothing else.
func TestEveryKindOfChangeIsFound(t *testing.T) {
	cases := []struct {
		name   string
		file   string
		change func(file *descriptorpb.FileDescriptorProto)
		want   []string
	}{
		{"field number", "kv.proto", func(file *descriptorpb.FileDescriptorProto) {
			field(file, "KeyValue", "lease").Number = proto.Int32(7)
		}, []string{"mvccpb.KeyValue.lease: got field 7"}},
		{"field type", "kv.proto", func(file *descriptorpb.FileDescriptorProto) {
			field(file, "KeyValue", "version").Type = descriptorpb.FieldDescriptorProto_TYPE_UINT64.Enum()
		}, []string{"mvccpb.KeyValue.version: got field 4 optional uint64"}},
		{"field name", "kv.proto", func(file *descriptorpb.FileDescriptorProto) {
			field(file, "KeyValue", "value").Name = proto.String("data")
		}, []string{"mvccpb.KeyValue.data: not in etcd", "mvccpb.KeyValue.value: missing"}},
		{"JSON name", "kv.proto", func(file *descriptorpb.FileDescriptorProto) {
			field(file, "Event", "prev_kv").JsonName = proto.String("prev")
		}, []string{"mvccpb.Event.prev_kv: got field 3 optional message mvccpb.KeyValue json=prev"}},
		{"label", "kv.proto", func(file *descriptorpb.FileDescriptorProto) {
			field(file, "Event", "kv").Label = descriptorpb.FieldDescriptorProto_LABEL_REPEATED.Enum()
		}, []string{"mvccpb.Event.kv: got field 2 repeated"}},
		{"message type of a field", "rpc.proto", func(file *descriptorpb.FileDescriptorProto) {
			field(file, "PutResponse", "header").TypeName = proto.String(".etcdserverpb.Member")
		}, []string{"etcdserverpb.PutResponse.header: got field 1 optional message etcdserverpb.Member"}},
		{"presence", "kv.proto", func(file *descriptorpb.FileDescriptorProto) {
			message := message(file, "Event")
			message.OneofDecl = append(message.OneofDecl, &descriptorpb.OneofDescriptorProto{Name: proto.String("_type")})
			field := field(file, "Event", "type")
			field.Proto3Optional = proto.Bool(true)
			field.OneofIndex = proto.Int32(0)
		}, []string{"mvccpb.Event._type: not in etcd", "mvccpb.Event.type: got field 1 optional enum"}},
		{"packing", "rpc.proto", func(file *descriptorpb.FileDescriptorProto) {
			filters := field(file, "WatchCreateRequest", "filters")
			filters.Options = &descriptorpb.FieldOptions{Packed: proto.Bool(false)}
		}, []string{"etcdserverpb.WatchCreateRequest.filters: got field 5 repeated enum"}},
		{"oneof left", "rpc.proto", func(file *descriptorpb.FileDescriptorProto) {
			field(file, "Compare", "lease").OneofIndex = nil
		}, []string{"etcdserverpb.Compare.lease: got field 8", "etcdserverpb.Compare.target_union: got oneof"}},
		{"oneof name", "rpc.proto", func(file *descriptorpb.FileDescriptorProto) {
			message(file, "WatchRequest").OneofDecl[0].Name = proto.String("kind")
		}, []string{
			"etcdserverpb.WatchRequest.cancel_request: got", "etcdserverpb.WatchRequest.create_request: got",
			"etcdserverpb.WatchRequest.kind: not in etcd", "etcdserverpb.WatchRequest.progress_request: got",
			"etcdserverpb.WatchRequest.request_union: missing",
		}},
		{"enum value number", "kv.proto", func(file *descriptorpb.FileDescriptorProto) {
			message(file, "Event").EnumType[0].Value[1].Number = proto.Int32(2)
		}, []string{"mvccpb.Event.EventType.DELETE: got value 2, want value 1"}},
		{"enum value dropped", "rpc.proto", func(file *descriptorpb.FileDescriptorProto) {
			alarm := file.EnumType[0]
			alarm.Value = alarm.Value[:2]
		}, []string{"etcdserverpb.AlarmType.CORRUPT: missing"}},
		{"server streaming", "rpc.proto", func(file *descriptorpb.FileDescriptorProto) {
			method(file, "Maintenance", "Snapshot").ServerStreaming = proto.Bool(false)
		}, []string{"etcdserverpb.Maintenance.Snapshot: got rpc etcdserverpb.SnapshotRequest stream=false -> etcdserverpb.SnapshotResponse stream=false"}},
		{"client streaming", "rpc.proto", func(file *descriptorpb.FileDescriptorProto) {
			method(file, "KV", "Put").ClientStreaming = proto.Bool(true)
		}, []string{"etcdserverpb.KV.Put: got rpc etcdserverpb.PutRequest stream=true"}},
		{"response type", "rpc.proto", func(file *descriptorpb.FileDescriptorProto) {
			method(file, "KV", "Put").OutputType = proto.String(".etcdserverpb.TxnResponse")
		}, []string{"etcdserverpb.KV.Put: got"}},
		{"message added", "kv.proto", func(file *descriptorpb.FileDescriptorProto) {
			file.MessageType = append(file.MessageType, &descriptorpb.DescriptorProto{Name: proto.String("Extra")})
		}, []string{"mvccpb.Extra: not in etcd"}},
		{"method dropped", "v3lock.proto", func(file *descriptorpb.FileDescriptorProto) {
			file.Service[0].Method = file.Service[0].Method[:1]
		}, []string{"v3lockpb.Lock.Unlock: missing"}},
		{"service renamed", "v3lock.proto", func(file *descriptorpb.FileDescriptorProto) {
			file.Service[0].Name = proto.String("Mutex")
		}, []string{
			"v3lockpb.Lock.Lock: missing", "v3lockpb.Lock.Unlock: missing", "v3lockpb.Lock: missing",
			"v3lockpb.Mutex.Lock: not in etcd", "v3lockpb.Mutex.Unlock: not in etcd", "v3lockpb.Mutex: not in etcd",
		}},
	}
	for _, test := range cases {
		t.Run(test.name, func(t *testing.T) {
			file, err := protoregistry.GlobalFiles.FindFileByPath(test.file)
			if err != nil {
				t.Fatal(err)
			}
			found := compareChanged(t, file, test.change)
			if !slices.EqualFunc(found, test.want, strings.HasPrefix) {
				t.Errorf("found %q, want %q", found, test.want)
			}
		})
	}
}

// compareChanged compares a file with a copy of it that has been changed.
func compareChanged(
	t *testing.T, file protoreflect.FileDescriptor, change func(*descriptorpb.FileDescriptorProto),
) []string {
	t.Helper()
	declared := protodesc.ToFileDescriptorProto(file)
	change(declared)
	// etcd's files are registered under other paths than they import each other by, so the types of
	// other files stay names here.
	changed, err := protodesc.FileOptions{AllowUnresolvable: true}.New(declared, new(protoregistry.Files))
	if err != nil {
		t.Fatalf("link the changed %s: %v", file.Path(), err)
	}
	return differences(factsOf(file), factsOf(changed))
}

func message(file *descriptorpb.FileDescriptorProto, name string) *descriptorpb.DescriptorProto {
	return named(file.MessageType, name)
}

func field(file *descriptorpb.FileDescriptorProto, owner, name string) *descriptorpb.FieldDescriptorProto {
	return named(message(file, owner).Field, name)
}

func method(file *descriptorpb.FileDescriptorProto, owner, name string) *descriptorpb.MethodDescriptorProto {
	return named(named(file.Service, owner).Method, name)
}

func named[D interface{ GetName() string }](list []D, name string) D {
	return list[slices.IndexFunc(list, func(item D) bool { return item.GetName() == name })]
}
