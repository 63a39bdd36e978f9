package load

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
)

// writeLimit is how long a steady write may take: longer than a member of either store lets it wait for a leader.
const writeLimit = 10 * time.Second

// Steady is an open-loop writer: a put is due at every tick, however many before it are still waiting, and none is tried again.
type Steady struct {
	stop func()
	done chan struct{}

	mutex  sync.Mutex
	acks   []time.Time
	failed []error
}

// StartSteady writes through one member until it is finished or the context ends.
func StartSteady(ctx context.Context, address string, every time.Duration) (*Steady, error) {
	conn, err := dial(address)
	if err != nil {
		return nil, err
	}
	ticking, stop := context.WithCancel(ctx)
	steady := &Steady{stop: stop, done: make(chan struct{})}
	go func() {
		defer close(steady.done)
		defer func() { _ = conn.Close() }()
		ticker := time.NewTicker(every)
		defer ticker.Stop()
		var writes sync.WaitGroup
		defer writes.Wait()
		for n := 0; ; n++ {
			select {
			case <-ticking.Done():
				return
			case <-ticker.C:
				writes.Go(func() { steady.write(ctx, conn, n) })
			}
		}
	}()
	return steady, nil
}

func (s *Steady) write(ctx context.Context, conn *grpc.ClientConn, n int) {
	limited, cancel := context.WithTimeout(ctx, writeLimit)
	defer cancel()
	_, err := call(limited, conn, putPath, &pb.PutRequest{Key: fmt.Appendf(nil, "steady-%d", n%1000), Value: make([]byte, 64)})
	now := time.Now()
	s.mutex.Lock()
	defer s.mutex.Unlock()
	switch {
	case err == nil:
		s.acks = append(s.acks, now)
	case ctx.Err() == nil:
		s.failed = append(s.failed, err)
	}
}

// Recent counts the acknowledgements since a time.
func (s *Steady) Recent(since time.Time) int {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	count := 0
	for i := len(s.acks) - 1; i >= 0 && !s.acks[i].Before(since); i-- {
		count++
	}
	return count
}

// Finish starts no more writes, waits for those that are under way (not if the context has ended) and returns the longest time
// between two acknowledgements of which the later came after since, and the writes that failed.
func (s *Steady) Finish(since time.Time) (gap time.Duration, failed []error) {
	s.stop()
	<-s.done
	s.mutex.Lock()
	defer s.mutex.Unlock()
	slices.SortFunc(s.acks, time.Time.Compare)
	for i := 1; i < len(s.acks); i++ {
		if s.acks[i].After(since) {
			gap = max(gap, s.acks[i].Sub(s.acks[i-1]))
		}
	}
	return gap, s.failed
}
