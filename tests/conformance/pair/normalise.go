package pair

import (
	"bytes"
	"slices"
	"strings"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// ttlSlack is how many seconds a remaining TTL may lie below the granted one and still count as "just granted".
const ttlSlack = 30

// Normalise returns a copy of a response without what two correct servers may answer differently: raft terms and indexes become
// 1 when they are positive, sizes likewise; lists without a defined order are sorted; a remaining TTL near the granted one
// becomes the granted one; the store hash (of a file format) becomes 1. Everything else stays, header revisions included.
func Normalise(response proto.Message) proto.Message {
	response = proto.Clone(response)
	flattenTerms(response.ProtoReflect())
	switch response := response.(type) {
	case *pb.StatusResponse:
		flatten(&response.RaftIndex)
		flatten(&response.RaftTerm)
		flatten(&response.RaftAppliedIndex)
		flatten(&response.DbSize)
		flatten(&response.DbSizeInUse)
		for i, text := range response.Errors {
			// The protobuf text format of Go puts one or two spaces between fields, at random for each build.
			response.Errors[i] = strings.Join(strings.Fields(text), " ")
		}
		slices.Sort(response.Errors)
	case *pb.HashResponse:
		flatten(&response.Hash)
	case *pb.LeaseTimeToLiveResponse:
		slices.SortFunc(response.Keys, bytes.Compare)
		if response.TTL <= response.GrantedTTL && response.TTL > response.GrantedTTL-ttlSlack && response.TTL > 0 {
			response.TTL = response.GrantedTTL
		}
	case *pb.LeaseLeasesResponse:
		slices.SortFunc(response.Leases, func(a, b *pb.LeaseStatus) int {
			switch {
			case a.ID < b.ID:
				return -1
			case a.ID > b.ID:
				return 1
			default:
				return 0
			}
		})
	case *pb.AlarmResponse:
		slices.SortFunc(response.Alarms, func(a, b *pb.AlarmMember) int {
			if a.MemberID != b.MemberID {
				if a.MemberID < b.MemberID {
					return -1
				}
				return 1
			}
			return int(a.Alarm - b.Alarm)
		})
	}
	return response
}

// flattenTerms sets every positive raft_term of a message to 1, in nested messages too.
func flattenTerms(message protoreflect.Message) {
	message.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		switch {
		case field.Kind() == protoreflect.MessageKind && field.IsList():
			for i := range value.List().Len() {
				flattenTerms(value.List().Get(i).Message())
			}
		case field.Kind() == protoreflect.MessageKind && !field.IsMap():
			flattenTerms(value.Message())
		case field.Name() == "raft_term" && value.Uint() > 0:
			message.Set(field, protoreflect.ValueOfUint64(1))
		}
		return true
	})
}

func flatten[N int64 | uint64 | uint32](number *N) {
	if *number > 0 {
		*number = 1
	}
}
