package pair

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
)

// received bounds the messages a stream may hold unread; no script comes near it.
const received = 1 << 16

// Watch is one watch stream of a session.
type Watch struct {
	s        *Session
	stream   grpc.BidiStreamingClient[pb.WatchRequest, pb.WatchResponse]
	cancel   context.CancelFunc
	messages chan *pb.WatchResponse
	// ended is closed, with err set, when the stream has ended and every message is in the channel.
	ended chan struct{}
	err   error
	// owed counts progress requests of Progress and Drain that may still be answered: such answers are read past.
	owed int
	// held are messages that Create has read past.
	held []*pb.WatchResponse
}

// Watch opens a watch stream.
func (s *Session) Watch() *Watch {
	w := &Watch{s: s, messages: make(chan *pb.WatchResponse, received), ended: make(chan struct{})}
	var ctx context.Context
	ctx, w.cancel = context.WithCancel(s.ctx)
	var err error
	if w.stream, err = pb.NewWatchClient(s.Store.Conn).Watch(ctx); err != nil {
		s.breakOff("watch stream: " + err.Error())
	}
	go func() {
		defer close(w.ended)
		defer close(w.messages)
		for {
			message, err := w.stream.Recv()
			if err != nil {
				w.err = err
				return
			}
			w.messages <- message
		}
	}()
	return w
}

// Send sends a request as it is.
func (w *Watch) Send(r *pb.WatchRequest) {
	w.s.record("watch> "+Text(r), "")
	if err := w.stream.Send(r); err != nil {
		w.s.breakOff("send on watch stream: " + err.Error())
	}
}

// Create sends a create request and records the answer. Messages of other watchers that come before it are kept for Take: when they come is
// not defined. A message of the new watcher must not come first.
func (w *Watch) Create(r *pb.WatchCreateRequest) *pb.WatchResponse {
	w.SendCreate(r)
	known := len(w.held)
	for {
		message := w.receive()
		if !message.Created {
			w.held = append(w.held, message)
			continue
		}
		for _, early := range w.held[known:] {
			w.s.Require(early.WatchId != message.WatchId, "a message before its watcher is created: %s", Text(early))
		}
		w.s.record("watch<", Text(Normalise(message)))
		return message
	}
}

// SendCreate sends a create request without reading.
func (w *Watch) SendCreate(r *pb.WatchCreateRequest) {
	w.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: r}})
}

// SendCancel sends a cancel request without reading.
func (w *Watch) SendCancel(id int64) {
	w.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CancelRequest{CancelRequest: &pb.WatchCancelRequest{WatchId: id}}})
}

// SendProgress sends a progress request without reading.
func (w *Watch) SendProgress() {
	w.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_ProgressRequest{ProgressRequest: &pb.WatchProgressRequest{}}})
}

// Next records the next message as it is.
func (w *Watch) Next() *pb.WatchResponse {
	message := w.Take()
	w.s.record("watch<", Text(Normalise(message)))
	return message
}

// Events reads until each watcher named has had as many events as said, and records the events of each watcher. How events are
// spread over messages is left open, but for the rules that no server may break: the header is not behind its events, and the
// events of one revision are in one message (a message marked as a fragment may end within one).
func (w *Watch) Events(want map[int64]int) {
	events := map[int64][]*pb.WatchResponse{}
	counts := map[int64]int{}
	for remaining := total(want); remaining > 0; {
		message := w.Take()
		w.check(message)
		id := message.WatchId
		if len(message.Events) == 0 || counts[id]+len(message.Events) > want[id] {
			w.s.breakOff(fmt.Sprintf("%s: a message not looked for: %s", w.s.Store.Name, Text(message)))
		}
		counts[id] += len(message.Events)
		remaining -= len(message.Events)
		events[id] = append(events[id], message)
	}
	for _, id := range slices.Sorted(maps.Keys(events)) {
		w.s.record(fmt.Sprintf("watch< events of %d", id), eventsText(events[id]))
	}
}

// Drain asks for progress until the stream says that everything up to revision is delivered, or a watcher is canceled, and
// records the events of each watcher and the cancels. It reports whether there was a cancel. Without a watcher it would never end.
func (w *Watch) Drain(revision int64) bool {
	events := map[int64][]*pb.WatchResponse{}
	var cancels []string
	take := func(message *pb.WatchResponse) (done bool) {
		switch {
		case message.Canceled:
			cancels = append(cancels, Text(Normalise(message)))
			return true
		case len(message.Events) > 0:
			w.check(message)
			events[message.WatchId] = append(events[message.WatchId], message)
		case message.WatchId == -1:
			w.owed--
			return message.GetHeader().GetRevision() >= revision
		}
		return false
	}
	for _, message := range w.held {
		take(message)
	}
	w.held = nil
	deadline := time.After(AnswerLimit)
	ask := time.NewTicker(20 * time.Millisecond)
	defer ask.Stop()
	for done := false; !done; {
		select {
		case message, open := <-w.messages:
			if !open {
				w.s.breakOff("watch stream ended: " + ErrorText(w.err))
			}
			done = take(message)
		case <-ask.C:
			w.ask()
		case <-deadline:
			w.s.breakOff(fmt.Sprintf("%s: no progress up to revision %d", w.s.Store.Name, revision))
		}
	}
	for _, id := range slices.Sorted(maps.Keys(events)) {
		w.s.record(fmt.Sprintf("watch< events of %d", id), eventsText(events[id]))
	}
	w.s.record(fmt.Sprintf("watch< all up to revision %d", revision), strings.Join(cancels, " "))
	return len(cancels) > 0
}

var progress = &pb.WatchRequest{RequestUnion: &pb.WatchRequest_ProgressRequest{ProgressRequest: &pb.WatchProgressRequest{}}}

// Progress sends progress requests until one is answered, and records the answer.
func (w *Watch) Progress() {
	deadline := time.Now().Add(AnswerLimit)
	for time.Now().Before(deadline) {
		w.ask()
		select {
		case message, open := <-w.messages:
			if !open {
				w.s.breakOff("watch stream ended: " + ErrorText(w.err))
			}
			w.owed--
			w.s.record("watch< progress", Text(Normalise(message)))
			return
		case <-time.After(50 * time.Millisecond):
		}
	}
	w.s.breakOff(w.s.Store.Name + ": no progress message")
}

func (w *Watch) ask() {
	if err := w.stream.Send(progress); err != nil {
		w.s.breakOff("send on watch stream: " + err.Error())
	}
	w.owed++
}

// CloseSend half-closes the stream.
func (w *Watch) CloseSend() {
	w.s.record("watch> half-close", "")
	_ = w.stream.CloseSend()
}

// Cancel cancels the stream from the client's side and waits until it is gone.
func (w *Watch) Cancel() {
	w.cancel()
	<-w.ended
}

// End waits for the server to end the stream and records the status.
func (w *Watch) End() {
	select {
	case <-w.ended:
		w.s.record("watch< end", ErrorText(w.err))
	case <-time.After(AnswerLimit):
		w.s.breakOff(w.s.Store.Name + ": the watch stream does not end")
	}
}

// Take reads the next message without recording it.
func (w *Watch) Take() *pb.WatchResponse {
	if len(w.held) > 0 {
		message := w.held[0]
		w.held = w.held[1:]
		return message
	}
	return w.receive()
}

// receive reads the next message from the stream, but for owed answers to progress requests.
func (w *Watch) receive() *pb.WatchResponse {
	limit := time.After(AnswerLimit)
	for {
		select {
		case message, open := <-w.messages:
			if !open {
				w.s.breakOff("watch stream ended: " + ErrorText(w.err))
			}
			if w.owed > 0 && message.WatchId == -1 && !message.Created && !message.Canceled && len(message.Events) == 0 {
				w.owed--
				continue
			}
			return message
		case <-limit:
			w.s.breakOff(w.s.Store.Name + ": no message on the watch stream")
		}
	}
}

func (w *Watch) check(message *pb.WatchResponse) {
	last := message.Events[len(message.Events)-1].Kv.ModRevision
	w.s.Require(message.GetHeader().GetRevision() >= last, "header behind its events: %s", Text(message))
}

// eventsText joins the events of one watcher, and says where a revision is torn between messages not marked as fragments.
func eventsText(messages []*pb.WatchResponse) string {
	var out strings.Builder
	last := int64(0)
	for i, message := range messages {
		for j, event := range message.Events {
			if j == 0 && i > 0 && event.Kv.ModRevision <= last && !messages[i-1].Fragment {
				out.WriteString("(TORN OR REPEATED) ")
			}
			last = event.Kv.ModRevision
			out.WriteString(Text(event))
			out.WriteByte(' ')
		}
	}
	return out.String()
}

func total(want map[int64]int) int {
	sum := 0
	for _, count := range want {
		sum += count
	}
	return sum
}

// RawWatch sends bytes on a new watch stream and records how the server ends it.
func (s *Session) RawWatch(payload []byte) {
	ctx, cancel := context.WithTimeout(s.ctx, AnswerLimit)
	defer cancel()
	description := &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}
	stream, err := s.Store.Conn.NewStream(ctx, description, "/etcdserverpb.Watch/Watch", grpc.ForceCodec(bytesCodec{}))
	if err == nil {
		err = stream.SendMsg(&payload)
	}
	if err == nil {
		var answer []byte
		err = stream.RecvMsg(&answer)
	}
	s.record("raw watch> "+Bytes(payload), ErrorText(err))
}
