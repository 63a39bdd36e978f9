package load

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protowire"
)

// pageKeys is the page of kube-apiserver and client-go.
const pageKeys = 500

// fill puts every key once, TxnOps at a time.
func fill(ctx context.Context, s Settings) (Result, error) {
	text := newValues(s.ValueBytes)
	s.Total = (s.Keys + s.TxnOps - 1) / s.TxnOps
	result, err := repeat(ctx, s, func(ctx context.Context, conn *grpc.ClientConn, _, n int) error {
		if s.TxnOps == 1 {
			_, err := call(ctx, conn, putPath, &pb.PutRequest{Key: key(n), Value: text.next()})
			return err
		}
		request := &pb.TxnRequest{}
		for i := n * s.TxnOps; i < min((n+1)*s.TxnOps, s.Keys); i++ {
			put := &pb.PutRequest{Key: key(i), Value: text.next()}
			request.Success = append(request.Success, &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: put}})
		}
		_, err := call(ctx, conn, txnPath, request)
		return err
	})
	result.Operations = int64(s.Keys)
	return result, err
}

// put writes one random key at a time.
func put(ctx context.Context, s Settings) (Result, error) {
	text := newValues(s.ValueBytes)
	return repeat(ctx, s, func(ctx context.Context, conn *grpc.ClientConn, _, _ int) error {
		_, err := call(ctx, conn, putPath, &pb.PutRequest{Key: key(rand.IntN(s.Keys)), Value: text.next()})
		return err
	})
}

// read gets one random key at a time.
func read(ctx context.Context, s Settings) (Result, error) {
	return repeat(ctx, s, func(ctx context.Context, conn *grpc.ClientConn, _, _ int) error {
		_, err := call(ctx, conn, rangePath, &pb.RangeRequest{Key: key(rand.IntN(s.Keys))})
		return err
	})
}

// count counts all keys.
func count(ctx context.Context, s Settings) (Result, error) {
	request := &pb.RangeRequest{Key: []byte(KeyPrefix), RangeEnd: prefixEnd(), CountOnly: true}
	return repeat(ctx, s, func(ctx context.Context, conn *grpc.ClientConn, _, _ int) error {
		answer, err := call(ctx, conn, rangePath, request)
		if err != nil {
			return err
		}
		seen, err := readListing(answer)
		if err == nil && seen.count != int64(s.Keys) {
			err = fmt.Errorf("counted %d keys of %d", seen.count, s.Keys)
		}
		return err
	})
}

// middle reads one page that starts at the middle key.
func middle(ctx context.Context, s Settings) (Result, error) {
	request := &pb.RangeRequest{Key: key(s.Keys / 2), RangeEnd: prefixEnd(), Limit: pageKeys}
	return repeat(ctx, s, func(ctx context.Context, conn *grpc.ClientConn, _, _ int) error {
		answer, err := call(ctx, conn, rangePath, request)
		if err != nil {
			return err
		}
		seen, err := readListing(answer)
		if err == nil && (seen.keys != pageKeys || seen.count != int64(s.Keys-s.Keys/2)) {
			err = fmt.Errorf("the page has %d keys and counts %d", seen.keys, seen.count)
		}
		return err
	})
}

// list reads all keys again and again, as Method says; its operations are keys, its latencies those of whole lists.
func list(ctx context.Context, s Settings) (Result, error) {
	methods := map[string]func(context.Context, *grpc.ClientConn, Settings) (int, error){
		"page": listPages, "stream": listStream, "unary": listUnary,
	}
	method, ok := methods[s.Method]
	if !ok {
		return Result{}, fmt.Errorf("unknown method %q", s.Method)
	}
	result, err := repeat(ctx, s, func(ctx context.Context, conn *grpc.ClientConn, _, _ int) error {
		keys, err := method(ctx, conn, s)
		if err == nil && keys != s.Keys {
			err = fmt.Errorf("listed %d keys of %d", keys, s.Keys)
		}
		return err
	})
	result.Operations *= int64(s.Keys)
	return result, err
}

// listPages lists as kube-apiserver does: each page at the first one's revision, from just after the last key.
func listPages(ctx context.Context, conn *grpc.ClientConn, _ Settings) (int, error) {
	request := &pb.RangeRequest{Key: []byte(KeyPrefix), RangeEnd: prefixEnd(), Limit: pageKeys}
	for keys := 0; ; {
		answer, err := call(ctx, conn, rangePath, request)
		if err != nil {
			return keys, err
		}
		seen, err := readListing(answer)
		if err != nil {
			return keys, err
		}
		keys += seen.keys
		if !seen.more {
			return keys, nil
		}
		request.Key = append(append([]byte(nil), seen.lastKey...), 0)
		request.Revision = seen.revision
	}
}

func listStream(ctx context.Context, conn *grpc.ClientConn, _ Settings) (int, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, streamPath)
	if err != nil {
		return 0, err
	}
	if err = stream.SendMsg(&pb.RangeRequest{Key: []byte(KeyPrefix), RangeEnd: prefixEnd()}); err != nil {
		return 0, err
	}
	if err = stream.CloseSend(); err != nil {
		return 0, err
	}
	var message rawMessage
	for keys := 0; ; {
		err := stream.RecvMsg(&message)
		if errors.Is(err, io.EOF) {
			return keys, nil
		}
		if err != nil {
			return keys, err
		}
		seen, err := readListing(fieldBytes(message, 1))
		if err != nil {
			return keys, err
		}
		keys += seen.keys
	}
}

// txn is kube-apiserver's update: put if the key is as it was last seen, else get it. Each client has keys of its own.
func txn(ctx context.Context, s Settings) (Result, error) {
	text := newValues(s.ValueBytes)
	perClient := max(1, s.Keys/s.Clients)
	type client struct {
		modRevision map[int]int64
		next        int
	}
	clients := make([]client, s.Clients)
	for i := range clients {
		clients[i].modRevision = map[int]int64{}
	}
	return repeat(ctx, s, func(ctx context.Context, conn *grpc.ClientConn, number, _ int) error {
		own := &clients[number]
		n := number*perClient + own.next%perClient
		own.next++
		name := key(n)
		answer, err := call(ctx, conn, txnPath, &pb.TxnRequest{
			Compare: []*pb.Compare{{
				Target: pb.Compare_MOD, Result: pb.Compare_EQUAL, Key: name,
				TargetUnion: &pb.Compare_ModRevision{ModRevision: own.modRevision[n]},
			}},
			Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: name, Value: text.next()}}}},
			Failure: []*pb.RequestOp{{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: name}}}},
		})
		if err != nil {
			return err
		}
		if fieldValue(answer, 2) == 0 {
			return fmt.Errorf("%s has been changed by somebody else", name)
		}
		own.modRevision[n] = int64(fieldValue(fieldBytes(answer, 1), 3))
		return nil
	})
}

// fanout puts to one key of a prefix that all watchers watch; its operations are events received, its latencies the time from
// the start of a put to the arrival of its event at each watcher. It ends when every watcher has every event.
func fanout(ctx context.Context, s Settings) (Result, error) {
	ctx, cancel := context.WithTimeout(ctx, s.Duration+30*time.Second)
	defer cancel()
	conns, closeAll, err := connect(s)
	if err != nil {
		return Result{}, err
	}
	defer closeAll()
	var (
		origin   = time.Now()
		events   = make(chan error, s.Watchers)
		delays   = make([][]time.Duration, s.Watchers)
		watching sync.WaitGroup
	)
	for i := range s.Watchers {
		stream, err := conns[i%len(conns)].NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, watchPath)
		if err != nil {
			return Result{}, err
		}
		create := &pb.WatchCreateRequest{Key: []byte(KeyPrefix), RangeEnd: prefixEnd()}
		request := &pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: create}}
		if err = stream.SendMsg(request); err != nil {
			return Result{}, err
		}
		var created rawMessage
		if err = stream.RecvMsg(&created); err != nil {
			return Result{}, err
		}
		watching.Go(func() {
			var err error
			delays[i], err = receive(stream, s.Total, origin)
			events <- err
		})
	}
	text := newValues(s.ValueBytes)
	putters := s
	putters.Connections = min(len(conns), s.Clients)
	start := time.Now()
	var putting sync.WaitGroup
	var putErr error
	putting.Go(func() {
		_, putErr = repeat(ctx, putters, func(ctx context.Context, conn *grpc.ClientConn, _, n int) error {
			stamped := protowire.AppendFixed64(make([]byte, 0, s.ValueBytes), uint64(time.Since(origin)))
			_, err := call(ctx, conn, putPath, &pb.PutRequest{Key: key(n % 1000), Value: append(stamped, text.next()[8:]...)})
			return err
		})
	})
	for range s.Watchers {
		if err := <-events; err != nil {
			return Result{}, err
		}
	}
	took := time.Since(start)
	watching.Wait()
	putting.Wait()
	var all []time.Duration
	for _, own := range delays {
		all = append(all, own...)
	}
	return summarise(all, took), putErr
}

// receive reads that many events from a watch and returns how old each was when it came.
func receive(stream grpc.ClientStream, total int, origin time.Time) ([]time.Duration, error) {
	delays := make([]time.Duration, 0, total)
	var message rawMessage
	for len(delays) < total {
		if err := stream.RecvMsg(&message); err != nil {
			return delays, err
		}
		now := time.Since(origin)
		err := eachField(message, func(number protowire.Number, event []byte, _ uint64) {
			if number != 11 {
				return
			}
			stamp, size := protowire.ConsumeFixed64(fieldBytes(fieldBytes(event, 2), 5))
			if size > 0 {
				delays = append(delays, now-time.Duration(stamp))
			}
		})
		if err != nil {
			return delays, err
		}
	}
	return delays, nil
}
