package contract

import (
	"os"
	"slices"
	"strings"
	"testing"

	_ "go.etcd.io/etcd/api/v3/authpb"
	_ "go.etcd.io/etcd/api/v3/etcdserverpb"
	_ "go.etcd.io/etcd/api/v3/mvccpb"
	_ "go.etcd.io/etcd/server/v3/etcdserver/api/v3election/v3electionpb"
	_ "go.etcd.io/etcd/server/v3/etcdserver/api/v3lock/v3lockpb"
	_ "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
)

// contractFiles are the files, as etcd's modules register them, that clients speak.
var contractFiles = []string{
	"auth.proto", "grpc/health/v1/health.proto", "kv.proto", "rpc.proto", "v3election.proto", "v3lock.proto",
}

// internalFiles are what etcd's members say to each other or to their disk, and its annotations.
// skeg has its own (package skegpb), or none.
var internalFiles = []string{"etcdserver.proto", "membership.proto", "raft_internal.proto", "version.proto"}

// libraryFiles are prefixes of what the modules register besides: protobuf, gRPC and the JSON gateway.
var libraryFiles = []string{"google/", "grpc/binlog/", "protoc-gen-openapiv2/"}

// ourPackage is what skeg adds: it is no part of the client contract.
const ourPackage = "skegpb"

func TestContractIsEtcds(t *testing.T) {
	want := factsOf(etcdFiles(t)...)
	got := factsOf(ourFiles(t)...)
	for _, difference := range differences(want, got) {
		t.Error(difference)
	}
	t.Logf("compared %d facts", len(want))
}

// A release that moves part of the contract to a new file must not pass unnoticed.
func TestEveryFileOfEtcdIsJudged(t *testing.T) {
	judged := map[string]bool{}
	for _, path := range slices.Concat(contractFiles, internalFiles) {
		judged[path] = true
	}
	seen := 0
	protoregistry.GlobalFiles.RangeFiles(func(file protoreflect.FileDescriptor) bool {
		inFile := func(prefix string) bool { return strings.HasPrefix(file.Path(), prefix) }
		if slices.ContainsFunc(libraryFiles, inFile) {
			return true
		}
		seen++
		if !judged[file.Path()] {
			t.Errorf("%s (package %s) is neither compared nor known as internal", file.Path(), file.Package())
		}
		return true
	})
	if seen != len(judged) {
		t.Errorf("etcd has %d files, %d are listed here", seen, len(judged))
	}
}

// etcdFiles returns the client contract of the etcd modules that go.mod pins.
func etcdFiles(t *testing.T) []protoreflect.FileDescriptor {
	t.Helper()
	var files []protoreflect.FileDescriptor
	for _, path := range contractFiles {
		file, err := protoregistry.GlobalFiles.FindFileByPath(path)
		if err != nil {
			t.Fatalf("find %s in etcd's modules: %v", path, err)
		}
		files = append(files, file)
	}
	return files
}

// ourFiles reads the descriptors that `cargo run -p skeg-proto --example descriptors` wrote.
func ourFiles(t *testing.T) []protoreflect.FileDescriptor {
	t.Helper()
	path := os.Getenv("SKEG_DESCRIPTORS")
	if path == "" {
		t.Fatal("SKEG_DESCRIPTORS must name a file written by: cargo run -p skeg-proto --example descriptors")
	}
	bytes, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("read our descriptors: %v", err)
	}
	var set descriptorpb.FileDescriptorSet
	if err := proto.Unmarshal(bytes, &set); err != nil {
		t.Fatalf("decode %s: %v", path, err)
	}
	registry, err := protodesc.NewFiles(&set)
	if err != nil {
		t.Fatalf("link %s: %v", path, err)
	}
	var files []protoreflect.FileDescriptor
	registry.RangeFiles(func(file protoreflect.FileDescriptor) bool {
		if file.Package() != ourPackage {
			files = append(files, file)
		}
		return true
	})
	return files
}
