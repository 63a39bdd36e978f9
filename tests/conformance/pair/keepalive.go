package pair

import (
	"context"
	"errors"
	"fmt"
	"io"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
)

// KeepAlive is one lease keep-alive stream of a session.
type KeepAlive struct {
	s      *Session
	stream grpc.BidiStreamingClient[pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse]
	cancel context.CancelFunc
}

// KeepAlive opens a keep-alive stream.
func (s *Session) KeepAlive() *KeepAlive {
	ctx, cancel := context.WithTimeout(s.ctx, AnswerLimit)
	stream, err := pb.NewLeaseClient(s.Store.Conn).LeaseKeepAlive(ctx)
	if err != nil {
		s.breakOff("keep-alive stream: " + err.Error())
	}
	return &KeepAlive{s, stream, cancel}
}

// Send sends a renewal without reading.
func (k *KeepAlive) Send(id int64) {
	k.s.record(fmt.Sprintf("keep-alive> %d", id), "")
	if err := k.stream.Send(&pb.LeaseKeepAliveRequest{ID: id}); err != nil {
		k.s.breakOff("send on keep-alive stream: " + err.Error())
	}
}

// Next records the next answer, or the end of the stream.
func (k *KeepAlive) Next() *pb.LeaseKeepAliveResponse {
	answer, err := k.stream.Recv()
	switch {
	case errors.Is(err, io.EOF):
		k.s.record("keep-alive<", "end")
	case err != nil:
		k.s.record("keep-alive<", ErrorText(err))
	default:
		k.s.record("keep-alive<", Text(Normalise(answer)))
	}
	return answer
}

// CloseSend half-closes the stream.
func (k *KeepAlive) CloseSend() {
	k.s.record("keep-alive> half-close", "")
	_ = k.stream.CloseSend()
}

// Cancel ends the stream from the client's side.
func (k *KeepAlive) Cancel() { k.cancel() }

// Renew renews a lease once on a stream of its own, without recording anything. It may be called beside the script.
func (s *Session) Renew(id int64) error {
	ctx, cancel := context.WithTimeout(s.ctx, AnswerLimit)
	defer cancel()
	stream, err := pb.NewLeaseClient(s.Store.Conn).LeaseKeepAlive(ctx)
	if err != nil {
		return err
	}
	if err = stream.Send(&pb.LeaseKeepAliveRequest{ID: id}); err != nil {
		return err
	}
	_, err = stream.Recv()
	return err
}
