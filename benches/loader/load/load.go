// Package load makes the requests that etcd's own load tool cannot: each load is one function of a Settings, run in a process of
// its own so that it can be pinned away from the server, and its Result goes to standard output as JSON.
//
// Answers are taken as bytes and walked, not decoded into messages: a client that costs more than the server would measure itself.
package load

import (
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
)

// Settings is what a load may be told; each uses what it needs.
type Settings struct {
	// Address is host:port of the server, or of several, separated by commas: each connection goes to the next of them.
	Address string
	// Duration ends a load that is bounded by time, Total one that is bounded by work.
	Duration time.Duration
	Total    int
	// Warm is for how long what is done does not count yet.
	Warm time.Duration
	// Clients make requests at once, over Connections; Rate is the most they start a second together (0: no limit).
	Clients, Connections, Rate int
	// Keys exist or are made, ValueBytes long; TxnOps puts go into one transaction.
	Keys, ValueBytes, TxnOps int
	// Watchers is the number of watch streams.
	Watchers int
	// Method is "page", "stream" or "unary" for lists.
	Method string
}

// Flags adds the settings to a flag set.
func (s *Settings) Flags(flags *flag.FlagSet) {
	flags.StringVar(&s.Address, "address", "127.0.0.1:2379", "host:port of the server, or several separated by commas")
	flags.DurationVar(&s.Duration, "duration", 5*time.Second, "how long to go on")
	flags.DurationVar(&s.Warm, "warm", 0, "how long not to count at first")
	flags.IntVar(&s.Total, "total", 0, "how many operations to make, where a load counts them")
	flags.IntVar(&s.Clients, "clients", 1, "requests at once")
	flags.IntVar(&s.Connections, "connections", 1, "connections")
	flags.IntVar(&s.Rate, "rate", 0, "operations a second, 0 for no limit")
	flags.IntVar(&s.Keys, "keys", 10_000, "number of keys")
	flags.IntVar(&s.ValueBytes, "value-bytes", 256, "bytes of a value")
	flags.IntVar(&s.TxnOps, "txn-ops", 1, "puts in a transaction")
	flags.IntVar(&s.Watchers, "watchers", 100, "watch streams")
	flags.StringVar(&s.Method, "method", "page", "page, stream or unary")
}

// Result is what a load measured.
type Result struct {
	// Operations done (keys listed, events received, where a load counts those), and the seconds they took.
	Operations int64   `json:"operations"`
	Seconds    float64 `json:"seconds"`
	// P50 and P99 are latencies in seconds of what the load times.
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
}

// Loads are the loads by name.
var Loads = map[string]func(context.Context, Settings) (Result, error){
	"count":  count,
	"fanout": fanout,
	"fill":   fill,
	"list":   list,
	"middle": middle,
	"put":    put,
	"read":   read,
	"txn":    txn,
}

// KeyPrefix is what all keys of fill start with.
const KeyPrefix = "/registry/pods/default/"

// key is the name of the n-th key: 34 bytes, in order.
func key(n int) []byte { return fmt.Appendf(nil, "%spod-%07d", KeyPrefix, n) }

// prefixEnd is the end of the range of all keys with KeyPrefix.
func prefixEnd() []byte {
	end := []byte(KeyPrefix)
	end[len(end)-1]++
	return end
}

// values gives every operation a value of its own: one that repeats from key to key would compress to nothing in a store that
// compresses, and so would one that does not look random.
type values struct {
	pool []byte
	size int
}

// poolBytes is far larger than what a store compresses at once.
const poolBytes = 4 << 20

func newValues(size int) values {
	random := rand.New(rand.NewPCG(1, uint64(size)))
	pool := make([]byte, 0, poolBytes+size+8)
	for len(pool) < poolBytes+size {
		pool = binary.LittleEndian.AppendUint64(pool, random.Uint64())
	}
	return values{pool, size}
}

// next returns some value. It is shared: not to be written to.
func (v values) next() []byte {
	at := rand.IntN(poolBytes)
	return v.pool[at : at+v.size]
}

// connect opens the connections of a load.
func connect(s Settings) ([]*grpc.ClientConn, func(), error) {
	conns := make([]*grpc.ClientConn, 0, s.Connections)
	closeAll := func() {
		for _, conn := range conns {
			_ = conn.Close()
		}
	}
	addresses := strings.Split(s.Address, ",")
	for i := range max(1, s.Connections) {
		conn, err := dial(addresses[i%len(addresses)])
		if err != nil {
			closeAll()
			return nil, nil, err
		}
		conns = append(conns, conn)
	}
	return conns, closeAll, nil
}

// operation is the n-th operation of one client.
type operation func(ctx context.Context, conn *grpc.ClientConn, client, n int) error

// repeat runs an operation from all clients until the duration is over, the total done or the context ended, at the rate, and times each.
// The latency of a paced operation counts from when it was due, so that a slow answer does not hide the ones waiting behind it.
func repeat(ctx context.Context, s Settings, do operation) (Result, error) {
	conns, closeAll, err := connect(s)
	if err != nil {
		return Result{}, err
	}
	defer closeAll()
	var (
		next      atomic.Int64
		wait      sync.WaitGroup
		latencies = make([][]time.Duration, s.Clients)
		failures  = make([]error, s.Clients)
		start     = time.Now()
	)
	for client := range s.Clients {
		wait.Go(func() {
			for {
				n := int(next.Add(1) - 1)
				if s.Total > 0 && n >= s.Total {
					return
				}
				due := time.Now()
				if s.Rate > 0 {
					due = start.Add(time.Duration(n) * time.Second / time.Duration(s.Rate))
					sleep(ctx, time.Until(due))
				}
				if ctx.Err() != nil {
					return
				}
				if s.Total == 0 && due.Sub(start) >= s.Duration {
					return
				}
				if err := do(ctx, conns[client%len(conns)], client, n); err != nil {
					if ctx.Err() == nil {
						failures[client] = err
					}
					return
				}
				if due.Sub(start) >= s.Warm {
					latencies[client] = append(latencies[client], time.Since(due))
				}
			}
		})
	}
	wait.Wait()
	result := summarise(slices.Concat(latencies...), time.Since(start)-s.Warm)
	// One failure says it all: the others are its like.
	if failed := slices.IndexFunc(failures, func(failure error) bool { return failure != nil }); failed >= 0 {
		return result, failures[failed]
	}
	return result, nil
}

// sleep waits for a time, or until the context ends.
func sleep(ctx context.Context, wait time.Duration) {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

func summarise(latencies []time.Duration, took time.Duration) Result {
	result := Result{Operations: int64(len(latencies)), Seconds: took.Seconds()}
	if len(latencies) == 0 {
		return result
	}
	slices.Sort(latencies)
	at := func(share float64) float64 {
		return latencies[min(len(latencies)-1, int(share*float64(len(latencies))))].Seconds()
	}
	result.P50, result.P99 = at(0.50), at(0.99)
	return result
}
