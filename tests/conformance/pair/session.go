package pair

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// AnswerLimit bounds the wait for one answer or one stream message.
const AnswerLimit = 15 * time.Second

// Session is one run of a script against one store. Its methods record what they ask and what comes back; they return an empty
// response, never nil, when the store answers with an error.
type Session struct {
	Store *Store
	// Revision is the store revision before the script, to be used for relative revisions.
	Revision int64

	lines  []line
	ctx    context.Context
	cancel context.CancelFunc
}

// NewSession prepares a session and reads the current revision.
func NewSession(store *Store) *Session {
	s := &Session{Store: store}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.Revision = s.Current()
	return s
}

// Current returns the store revision without recording the question.
func (s *Session) Current() int64 {
	ctx, cancel := context.WithTimeout(s.ctx, AnswerLimit)
	defer cancel()
	answer, err := pb.NewKVClient(s.Store.Conn).Range(ctx, &pb.RangeRequest{Key: []byte("revision?")})
	if err != nil {
		return -1
	}
	return answer.GetHeader().GetRevision()
}

// With returns a session on the same transcript whose calls carry the metadata pairs.
func (s *Session) With(pairs ...string) *Session {
	s.ctx = metadata.AppendToOutgoingContext(s.ctx, pairs...)
	return s
}

// Note records a fact that must be equal on both stores.
func (s *Session) Note(what string, fact any) { s.record(what, fmt.Sprint(fact)) }

// Require ends the script, as a failure, unless the condition holds.
func (s *Session) Require(condition bool, format string, arguments ...any) {
	if !condition {
		s.breakOff(s.Store.Name + ": " + fmt.Sprintf(format, arguments...))
	}
}

// Await polls until the condition holds, and ends the script if it never does.
func (s *Session) Await(what string, condition func() bool) {
	for deadline := time.Now().Add(AnswerLimit); !condition(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			s.breakOff("never came true: " + what)
		}
	}
}

// Range asks KV/Range.
func (s *Session) Range(r *pb.RangeRequest) *pb.RangeResponse {
	return call(s, "KV/Range", r, &pb.RangeResponse{})
}

// Put asks KV/Put.
func (s *Session) Put(r *pb.PutRequest) *pb.PutResponse {
	return call(s, "KV/Put", r, &pb.PutResponse{})
}

// Delete asks KV/DeleteRange.
func (s *Session) Delete(r *pb.DeleteRangeRequest) *pb.DeleteRangeResponse {
	return call(s, "KV/DeleteRange", r, &pb.DeleteRangeResponse{})
}

// Txn asks KV/Txn.
func (s *Session) Txn(r *pb.TxnRequest) *pb.TxnResponse {
	return call(s, "KV/Txn", r, &pb.TxnResponse{})
}

// Compact asks KV/Compact.
func (s *Session) Compact(r *pb.CompactionRequest) *pb.CompactionResponse {
	return call(s, "KV/Compact", r, &pb.CompactionResponse{})
}

// Grant asks Lease/LeaseGrant.
func (s *Session) Grant(id, ttl int64) *pb.LeaseGrantResponse {
	return call(s, "Lease/LeaseGrant", &pb.LeaseGrantRequest{ID: id, TTL: ttl}, &pb.LeaseGrantResponse{})
}

// Revoke asks Lease/LeaseRevoke.
func (s *Session) Revoke(id int64) *pb.LeaseRevokeResponse {
	return call(s, "Lease/LeaseRevoke", &pb.LeaseRevokeRequest{ID: id}, &pb.LeaseRevokeResponse{})
}

// TimeToLive asks Lease/LeaseTimeToLive.
func (s *Session) TimeToLive(id int64, keys bool) *pb.LeaseTimeToLiveResponse {
	return call(s, "Lease/LeaseTimeToLive", &pb.LeaseTimeToLiveRequest{ID: id, Keys: keys}, &pb.LeaseTimeToLiveResponse{})
}

// Leases asks Lease/LeaseLeases.
func (s *Session) Leases() *pb.LeaseLeasesResponse {
	return call(s, "Lease/LeaseLeases", &pb.LeaseLeasesRequest{}, &pb.LeaseLeasesResponse{})
}

// Status asks Maintenance/Status.
func (s *Session) Status() *pb.StatusResponse {
	return call(s, "Maintenance/Status", &pb.StatusRequest{}, &pb.StatusResponse{})
}

// HashKV asks Maintenance/HashKV.
func (s *Session) HashKV(revision int64) *pb.HashKVResponse {
	return call(s, "Maintenance/HashKV", &pb.HashKVRequest{Revision: revision}, &pb.HashKVResponse{})
}

// Alarm asks Maintenance/Alarm.
func (s *Session) Alarm(r *pb.AlarmRequest) *pb.AlarmResponse {
	return call(s, "Maintenance/Alarm", r, &pb.AlarmResponse{})
}

// Call asks any unary method of package etcdserverpb, given as Service/Method, into response.
func (s *Session) Call(method string, request, response proto.Message, options ...grpc.CallOption) {
	call(s, method, request, response, options...)
}

// Quietly asks Service/Method without recording anything.
func (s *Session) Quietly(method string, request, response proto.Message) error {
	ctx, cancel := context.WithTimeout(s.ctx, AnswerLimit)
	defer cancel()
	return s.Store.Conn.Invoke(ctx, "/etcdserverpb."+method, request, response)
}

func call[R proto.Message](s *Session, method string, request proto.Message, response R, options ...grpc.CallOption) R {
	ctx, cancel := context.WithTimeout(s.ctx, AnswerLimit)
	defer cancel()
	err := s.Store.Conn.Invoke(ctx, "/etcdserverpb."+method, request, response, options...)
	asked := method + " " + Text(request)
	if err != nil {
		s.record(asked, ErrorText(err))
	} else {
		s.record(asked, Text(Normalise(response)))
	}
	return response
}

// Raw sends bytes as they are to a full method path and records the status alone.
func (s *Session) Raw(path string, payload []byte) {
	s.record("raw "+path+" "+Bytes(payload), ErrorText(s.Ask(path, payload)))
}

// Ask sends bytes as they are to a full method path, without recording anything.
func (s *Session) Ask(path string, payload []byte) error {
	ctx, cancel := context.WithTimeout(s.ctx, AnswerLimit)
	defer cancel()
	var answer []byte
	return s.Store.Conn.Invoke(ctx, path, &payload, &answer, grpc.ForceCodec(bytesCodec{}))
}

// RangeStream asks KV/RangeStream and records the merged result; it returns the messages as they came.
func (s *Session) RangeStream(r *pb.RangeRequest) []*pb.RangeResponse {
	return s.rangeStream(r, func(*pb.RangeResponse) {})
}

// RangeStreamUnordered asks KV/RangeStream and records the merged result, sorted by key.
func (s *Session) RangeStreamUnordered(r *pb.RangeRequest) {
	s.rangeStream(r, func(merged *pb.RangeResponse) {
		slices.SortFunc(merged.Kvs, func(a, b *mvccpb.KeyValue) int { return bytes.Compare(a.Key, b.Key) })
	})
}

func (s *Session) rangeStream(r *pb.RangeRequest, arrange func(*pb.RangeResponse)) []*pb.RangeResponse {
	ctx, cancel := context.WithTimeout(s.ctx, AnswerLimit)
	defer cancel()
	asked := "KV/RangeStream " + Text(r)
	stream, err := pb.NewKVClient(s.Store.Conn).RangeStream(ctx, r)
	var parts []*pb.RangeResponse
	merged := &pb.RangeResponse{}
	for err == nil {
		var part *pb.RangeStreamResponse
		if part, err = stream.Recv(); err == nil {
			parts = append(parts, part.RangeResponse)
			proto.Merge(merged, part.RangeResponse)
		}
	}
	if errors.Is(err, io.EOF) {
		arrange(merged)
		s.record(asked, Text(Normalise(merged)))
	} else {
		s.record(asked, ErrorText(err))
	}
	return parts
}

// ErrorText is code and message of an error as a client sees them. The reason a request could not be decoded is the decoder's
// own affair and cut off.
func ErrorText(err error) string {
	if err == nil {
		return "OK"
	}
	answer, _ := status.FromError(err)
	message := answer.Message()
	if answer.Code() == codes.Internal {
		message = undecodable(message)
	}
	text := fmt.Sprintf("error %v: %s", answer.Code(), message)
	if len(answer.Details()) > 0 {
		text += fmt.Sprintf(" with %d details", len(answer.Details()))
	}
	return text
}

func (s *Session) record(request, answer string) {
	s.lines = append(s.lines, line{request, answer})
}

func (s *Session) breakOff(reason string) {
	panic(brokenOff(reason))
}

func (s *Session) close() { s.cancel() }

// bytesCodec passes *[]byte through under the name of the protobuf codec.
type bytesCodec struct{}

var _ encoding.Codec = bytesCodec{}

func (bytesCodec) Marshal(value any) ([]byte, error) { return *value.(*[]byte), nil }
func (bytesCodec) Unmarshal(data []byte, value any) error {
	*value.(*[]byte) = append([]byte(nil), data...)
	return nil
}
func (bytesCodec) Name() string { return "proto" }
