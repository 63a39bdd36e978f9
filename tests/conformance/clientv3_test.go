package conformance

import (
	"context"
	"fmt"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.etcd.io/etcd/client/v3/mirror"
	"go.etcd.io/etcd/client/v3/namespace"
	"go.uber.org/zap"

	"skeg.local/conformance/pair"
)

// open connects the stock Go client to the store of a session.
func open(s *pair.Session) (*clientv3.Client, context.Context, func()) {
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{s.Store.ClientAddress}, DialTimeout: pair.AnswerLimit, Logger: zap.NewNop()})
	s.Require(err == nil, "client: %v", err)
	ctx, cancel := context.WithTimeout(context.Background(), pair.AnswerLimit)
	return client, ctx, func() {
		cancel()
		_ = client.Close()
	}
}

func TestClient(t *testing.T) {
	must := func(s *pair.Session, err error) { s.Require(err == nil, "%v", err) }
	check(t, []scenario{
		{name: "clientv3/kv", script: func(s *pair.Session) {
			client, ctx, done := open(s)
			defer done()
			for _, operation := range []clientv3.Op{
				clientv3.OpPut("a", "1"), clientv3.OpPut("a", "2", clientv3.WithPrevKV()), clientv3.OpGet("", clientv3.WithPrefix()), clientv3.OpGet("a", clientv3.WithSerializable()),
				clientv3.OpGet("", clientv3.WithFromKey(), clientv3.WithCountOnly()), clientv3.OpDelete("none"), clientv3.OpPut("", "x"), clientv3.OpPut("a", "", clientv3.WithIgnoreValue()),
				clientv3.OpTxn([]clientv3.Cmp{clientv3.Compare(clientv3.Value("a"), "=", "2")}, []clientv3.Op{clientv3.OpGet("a"), clientv3.OpPut("b", "1")}, nil),
				clientv3.OpGet("a", clientv3.WithRev(1<<40)), clientv3.OpDelete("", clientv3.WithFromKey(), clientv3.WithPrevKV()),
			} {
				answer, err := client.Do(ctx, operation)
				switch {
				case err != nil:
					s.Note("client", fmt.Sprintf("%T %v", err, err))
				case answer.Put() != nil:
					s.Note("client", pair.Text(pair.Normalise((*pb.PutResponse)(answer.Put()))))
				case answer.Get() != nil:
					s.Note("client", pair.Text(pair.Normalise((*pb.RangeResponse)(answer.Get()))))
				case answer.Del() != nil:
					s.Note("client", pair.Text(pair.Normalise((*pb.DeleteRangeResponse)(answer.Del()))))
				default:
					s.Note("client", pair.Text(pair.Normalise((*pb.TxnResponse)(answer.Txn()))))
				}
			}
		}},
		{name: "clientv3/watch", script: func(s *pair.Session) {
			client, ctx, done := open(s)
			defer done()
			fill(s)
			channel := client.Watch(clientv3.WithRequireLeader(ctx), "a", clientv3.WithFromKey(), clientv3.WithRev(s.Revision+1), clientv3.WithCreatedNotify(), clientv3.WithPrevKV())
			events := 0
			for response := range channel {
				must(s, response.Err())
				for _, event := range response.Events {
					s.Note("event", fmt.Sprintf("%v %q %q %d %d %v", event.Type, event.Kv.Key, event.Kv.Value, event.Kv.ModRevision, event.Kv.Version, event.PrevKv != nil))
					events++
				}
				if events == 8 {
					break
				}
			}
			must(s, client.RequestProgress(clientv3.WithRequireLeader(ctx)))
			for response := range channel {
				if response.IsProgressNotify() {
					s.Note("progress", response.Header.Revision)
					break
				}
			}
		}},
		{name: "clientv3/watch-of-a-compacted-revision", script: func(s *pair.Session) {
			client, ctx, done := open(s)
			defer done()
			fill(s)
			s.Compact(compact(s.Current(), true))
			for response := range client.Watch(ctx, "a", clientv3.WithRev(s.Revision+1)) {
				s.Note("response", fmt.Sprintf("%v %v %d", response.Err(), response.Canceled, response.CompactRevision))
			}
		}},
		{name: "clientv3/keep-alive", script: func(s *pair.Session) {
			client, ctx, done := open(s)
			defer done()
			grant, err := client.Grant(ctx, 2)
			must(s, err)
			channel, err := client.KeepAlive(ctx, grant.ID)
			must(s, err)
			for range 3 {
				response := <-channel
				s.Require(response != nil && response.ID == grant.ID, "keep-alive channel")
				s.Note("ttl", response.TTL)
			}
			_, err = client.Revoke(ctx, grant.ID)
			must(s, err)
			_, err = client.KeepAliveOnce(ctx, grant.ID)
			s.Note("keep alive once", err)
			for range channel {
			}
		}},
		{name: "clientv3/recipes", script: func(s *pair.Session) {
			client, ctx, done := open(s)
			defer done()
			session, err := concurrency.NewSession(client, concurrency.WithTTL(5))
			must(s, err)
			mutex := concurrency.NewMutex(session, "lock")
			must(s, mutex.Lock(ctx))
			other, err := concurrency.NewSession(client, concurrency.WithTTL(5))
			must(s, err)
			s.Note("second lock", concurrency.NewMutex(other, "lock").TryLock(ctx))
			must(s, mutex.Unlock(ctx))
			s.Note("second lock", concurrency.NewMutex(other, "lock").TryLock(ctx))
			election := concurrency.NewElection(session, "office")
			must(s, election.Campaign(ctx, "one"))
			must(s, election.Proclaim(ctx, "still one"))
			leader, err := election.Leader(ctx)
			must(s, err)
			s.Note("leader", string(leader.Kvs[0].Value))
			won := make(chan error, 1)
			rival := concurrency.NewElection(other, "office")
			go func() { won <- rival.Campaign(ctx, "two") }()
			must(s, session.Close())
			must(s, <-won)
			leader, err = rival.Leader(ctx)
			must(s, err)
			s.Note("leader", string(leader.Kvs[0].Value))
			must(s, rival.Resign(ctx))
			_, err = rival.Leader(ctx)
			s.Note("leader", err)
			must(s, other.Close())
		}},
		{name: "clientv3/stm", script: func(s *pair.Session) {
			client, ctx, done := open(s)
			defer done()
			for _, isolation := range []concurrency.Isolation{concurrency.Serializable, concurrency.SerializableSnapshot, concurrency.RepeatableReads, concurrency.ReadCommitted} {
				response, err := concurrency.NewSTM(client, func(stm concurrency.STM) error {
					stm.Put("sum", stm.Get("sum")+"x")
					stm.Put("b", stm.Get("none"))
					stm.Del("c")
					return nil
				}, concurrency.WithIsolation(isolation), concurrency.WithAbortContext(ctx))
				must(s, err)
				s.Note("stm", response.Header.Revision)
				s.Range(everything())
			}
		}},
		{name: "clientv3/mirror-and-namespace", script: func(s *pair.Session) {
			client, ctx, done := open(s)
			defer done()
			many(s, 250)
			inside := namespace.NewKV(client, "k")
			answer, err := inside.Get(ctx, "", clientv3.WithPrefix(), clientv3.WithLimit(3))
			must(s, err)
			s.Note("namespace", fmt.Sprint(answer.Count, string(answer.Kvs[0].Key)))
			syncer := mirror.NewSyncer(client, "k", 0)
			pages, failures := syncer.SyncBase(ctx)
			keys := 0
			for page := range pages {
				keys += len(page.Kvs)
			}
			must(s, <-failures)
			s.Note("mirrored", keys)
			updates := syncer.SyncUpdates(ctx)
			s.Put(put("knew", "1"))
			update := <-updates
			s.Note("update", fmt.Sprint(len(update.Events), string(update.Events[0].Kv.Key), update.Events[0].Kv.ModRevision))
		}},
		{name: "clientv3/deadline-and-cancel", script: func(s *pair.Session) {
			client, _, done := open(s)
			defer done()
			expired, cancel := context.WithDeadline(context.Background(), time.Now().Add(-time.Second))
			defer cancel()
			_, err := client.Put(expired, "a", "1")
			s.Note("expired", err)
			canceled, cancel := context.WithCancel(context.Background())
			cancel()
			_, err = client.Get(canceled, "a")
			s.Note("canceled", err)
		}},
	})
}
