package pair

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

// Pool starts pairs, keeps one shared pair for each set of flags, and always has one fresh pair with default flags in the making,
// for a start takes longer than most scripts.
type Pool struct {
	// EtcdBin and SkegBin are the server binaries, Dir the folder for their data.
	EtcdBin, SkegBin, Dir string

	mutex  sync.Mutex
	shared map[string]*Pair
	next   chan started
}

type started struct {
	pair *Pair
	err  error
}

// Fresh returns a pair nobody has used. The caller stops it.
func (p *Pool) Fresh(flags ...string) (*Pair, error) {
	if len(flags) > 0 {
		return p.start(flags)
	}
	p.mutex.Lock()
	next := p.next
	p.next = make(chan started, 1)
	go func(into chan started) {
		pair, err := p.start(nil)
		into <- started{pair, err}
	}(p.next)
	p.mutex.Unlock()
	if next == nil {
		return p.start(nil)
	}
	ready := <-next
	return ready.pair, ready.err
}

// Shared returns the pair for these flags, without keys and leases but at whatever revision it has come to. A pair that
// is not in step any more is replaced.
func (p *Pool) Shared(flags ...string) (*Pair, error) {
	name := fmt.Sprintf("%q", flags)
	p.mutex.Lock()
	pair := p.shared[name]
	p.mutex.Unlock()
	if pair != nil {
		if pair.inStep() {
			return pair, nil
		}
		pair.Stop()
	}
	pair, err := p.Fresh(flags...)
	if err != nil {
		return nil, err
	}
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if p.shared == nil {
		p.shared = map[string]*Pair{}
	}
	p.shared[name] = pair
	return pair, nil
}

// Stop ends every pair the pool still holds.
func (p *Pool) Stop() {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	for _, pair := range p.shared {
		pair.Stop()
	}
	if p.next != nil {
		if ready := <-p.next; ready.err == nil {
			ready.pair.Stop()
		}
	}
}

func (p *Pool) start(flags []string) (*Pair, error) {
	pair := &Pair{}
	var etcdErr, skegErr error
	var wait sync.WaitGroup
	wait.Go(func() { pair.Etcd, etcdErr = Start("etcd", p.EtcdBin, p.Dir, flags...) })
	wait.Go(func() { pair.Skeg, skegErr = Start("skeg", p.SkegBin, p.Dir, flags...) })
	wait.Wait()
	if etcdErr != nil || skegErr != nil {
		for _, store := range []*Store{pair.Etcd, pair.Skeg} {
			if store != nil {
				store.Stop()
			}
		}
		return nil, fmt.Errorf("start: etcd %v, skeg %v", etcdErr, skegErr)
	}
	return pair, nil
}

// inStep empties both stores and reports whether they then agree on revision and hash.
func (p *Pair) inStep() bool {
	etcd, etcdErr := p.Etcd.empty()
	skeg, skegErr := p.Skeg.empty()
	return etcdErr == nil && skegErr == nil && slices.Equal(etcd, skeg)
}

// empty revokes all leases and deletes all keys; it returns the revision and HashKV after that.
func (s *Store) empty() ([]int64, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	leases, err := pb.NewLeaseClient(s.Conn).LeaseLeases(ctx, &pb.LeaseLeasesRequest{})
	if err != nil {
		return nil, err
	}
	everything := []byte{0}
	if _, err = pb.NewKVClient(s.Conn).DeleteRange(ctx, &pb.DeleteRangeRequest{Key: everything, RangeEnd: everything}); err != nil {
		return nil, err
	}
	for _, lease := range leases.Leases {
		if _, err = pb.NewLeaseClient(s.Conn).LeaseRevoke(ctx, &pb.LeaseRevokeRequest{ID: lease.ID}); err != nil {
			return nil, err
		}
	}
	hash, err := pb.NewMaintenanceClient(s.Conn).HashKV(ctx, &pb.HashKVRequest{})
	if err != nil {
		return nil, err
	}
	alarms, err := pb.NewMaintenanceClient(s.Conn).Alarm(ctx, &pb.AlarmRequest{})
	if err != nil {
		return nil, err
	}
	if len(alarms.Alarms) > 0 {
		return nil, errors.New("an alarm is raised")
	}
	return []int64{hash.GetHeader().GetRevision(), int64(hash.Hash)}, nil
}
