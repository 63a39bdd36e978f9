package conformance

import (
	"fmt"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"skeg.local/conformance/pair"
)

// Short forms of requests. Strings hold any bytes.

// deepest is how many transactions may be nested in each other for skeg: docs/compatibility.md.
const deepest = 49

// fromKey is the range_end that means every key from key on.
const fromKey = "\x00"

func put(key, value string) *pb.PutRequest {
	return &pb.PutRequest{Key: []byte(key), Value: []byte(value)}
}

func leased(key, value string, lease int64) *pb.PutRequest {
	return &pb.PutRequest{Key: []byte(key), Value: []byte(value), Lease: lease}
}

func get(key string) *pb.RangeRequest { return &pb.RangeRequest{Key: []byte(key)} }

func span(key, end string) *pb.RangeRequest {
	return &pb.RangeRequest{Key: []byte(key), RangeEnd: []byte(end)}
}

func everything() *pb.RangeRequest { return span("\x00", fromKey) }

// with changes a request in place, so that options can be given in an expression.
func with[R any](request *R, change func(*R)) *R {
	change(request)
	return request
}

func del(key, end string) *pb.DeleteRangeRequest {
	return &pb.DeleteRangeRequest{Key: []byte(key), RangeEnd: []byte(end)}
}

func delPrev(key, end string) *pb.DeleteRangeRequest {
	return &pb.DeleteRangeRequest{Key: []byte(key), RangeEnd: []byte(end), PrevKv: true}
}

func compact(revision int64, physical bool) *pb.CompactionRequest {
	return &pb.CompactionRequest{Revision: revision, Physical: physical}
}

// op wraps a request as a txn operation.
func op(request any) *pb.RequestOp {
	switch request := request.(type) {
	case *pb.RangeRequest:
		return &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: request}}
	case *pb.PutRequest:
		return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: request}}
	case *pb.DeleteRangeRequest:
		return &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: request}}
	case *pb.TxnRequest:
		return &pb.RequestOp{Request: &pb.RequestOp_RequestTxn{RequestTxn: request}}
	case *pb.RequestOp:
		return request
	default:
		panic(fmt.Sprintf("no txn operation: %T", request))
	}
}

func ops(requests ...any) []*pb.RequestOp {
	var list []*pb.RequestOp
	for _, request := range requests {
		list = append(list, op(request))
	}
	return list
}

func compares(list ...*pb.Compare) []*pb.Compare { return list }

// txn builds a transaction; then and otherwise may be nil.
func txn(compare []*pb.Compare, then, otherwise []*pb.RequestOp) *pb.TxnRequest {
	return &pb.TxnRequest{Compare: compare, Success: then, Failure: otherwise}
}

// do is an unconditional transaction.
func do(requests ...any) *pb.TxnRequest { return txn(nil, ops(requests...), nil) }

const (
	equal    = pb.Compare_EQUAL
	greater  = pb.Compare_GREATER
	less     = pb.Compare_LESS
	notEqual = pb.Compare_NOT_EQUAL
)

func ifVersion(key string, result pb.Compare_CompareResult, version int64) *pb.Compare {
	return &pb.Compare{Key: []byte(key), Result: result, Target: pb.Compare_VERSION, TargetUnion: &pb.Compare_Version{Version: version}}
}

func ifCreate(key string, result pb.Compare_CompareResult, revision int64) *pb.Compare {
	return &pb.Compare{Key: []byte(key), Result: result, Target: pb.Compare_CREATE, TargetUnion: &pb.Compare_CreateRevision{CreateRevision: revision}}
}

func ifMod(key string, result pb.Compare_CompareResult, revision int64) *pb.Compare {
	return &pb.Compare{Key: []byte(key), Result: result, Target: pb.Compare_MOD, TargetUnion: &pb.Compare_ModRevision{ModRevision: revision}}
}

func ifValue(key string, result pb.Compare_CompareResult, value string) *pb.Compare {
	return &pb.Compare{Key: []byte(key), Result: result, Target: pb.Compare_VALUE, TargetUnion: &pb.Compare_Value{Value: []byte(value)}}
}

func ifLease(key string, result pb.Compare_CompareResult, lease int64) *pb.Compare {
	return &pb.Compare{Key: []byte(key), Result: result, Target: pb.Compare_LEASE, TargetUnion: &pb.Compare_Lease{Lease: lease}}
}

// over widens a compare to a range.
func over(compare *pb.Compare, end string) *pb.Compare {
	compare.RangeEnd = []byte(end)
	return compare
}

// fill puts a=1 … in several versions, so that key, version, create, mod and value orders all differ.
func fill(s *pair.Session) {
	for _, pair := range [][2]string{{"b", "5"}, {"a", "4"}, {"d", "1"}, {"c", "3"}, {"a", "9"}, {"e", "2"}, {"a", "0"}, {"d", "7"}} {
		s.Put(put(pair[0], pair[1]))
	}
}
