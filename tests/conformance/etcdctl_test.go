package conformance

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"skeg.local/conformance/pair"
)

// formats are the output formats of etcdctl that are text.
var formats = []string{"simple", "json", "fields", "table"}

func TestEtcdctl(t *testing.T) {
	// run splits a line at spaces; an argument with spaces is written with '_'.
	run := func(s *pair.Session, lines ...string) {
		for _, line := range lines {
			command := []string{etcdctl}
			for _, argument := range strings.Fields(line) {
				command = append(command, strings.ReplaceAll(argument, "_", " "))
			}
			s.Run("", command...)
		}
	}
	inFormats := func(s *pair.Session, lines ...string) {
		for _, line := range lines {
			for _, format := range formats {
				run(s, line+" -w "+format)
			}
		}
	}
	check(t, []scenario{
		{name: "etcdctl/put", script: func(s *pair.Session) {
			run(s, "put a 1", "put a 2 --prev-kv", "put a --ignore-value", "put none --ignore-value", "put a 3 --lease=7b", "lease grant 1000", "put", "put a", "put a 1 2")
			s.Grant(0x7b, 1000)
			run(s, "put a 3 --lease=7b --prev-kv", "put a 4 --ignore-lease --prev-kv", "put a 5 --lease=nothex")
			inFormats(s, "put b 1", "put b 2 --prev-kv")
			s.Run("from the standard input", etcdctl, "put", "piped")
			run(s, "get piped", "get a -w fields")
		}},
		{name: "etcdctl/get", script: func(s *pair.Session) {
			fill(s)
			s.Put(put("a\x00\xff", "\x01binary"))
			inFormats(s, "get a", "get none", "get a z", "get --prefix=true a", "get --from-key c")
			run(s, "get --prefix", "get a c", "get a --hex", "get --prefix a --hex -w json", "get a --print-value-only", "get --prefix --keys-only a", "get --prefix --count-only a", "get --prefix --count-only a -w fields",
				"get --prefix --limit=2 a", "get a z --limit=2 -w json", "get --from-key --order=DESCEND a", "get --from-key --order=ASCEND --sort-by=MODIFY a", "get --from-key --sort-by=VALUE a", "get --from-key --sort-by=CREATE --order=DESCEND a",
				"get a z --sort-by=KEY --order=DESCEND --limit=1", "get a --order=SIDEWAYS", "get a --sort-by=COLOUR", "get --prefix --from-key a", "get a --consistency=s", "get a --consistency=l", "get a --consistency=x",
				"get a z --stream", "get a z --stream -w json", "get a z --stream --limit=2", "get --stream none", "get a z --stream --order=DESCEND", "get --stream --keys-only a z", "get --stream --count-only a z")
			for _, offset := range []int64{1, 3, 5, 100} {
				run(s, fmt.Sprintf("get --from-key a --rev=%d", s.Revision+offset), fmt.Sprintf("get --from-key a --min-mod-rev=%d -w json", s.Revision+offset),
					fmt.Sprintf("get --from-key a --max-create-rev=%d -w json", s.Revision+offset), fmt.Sprintf("get --from-key a --min-create-rev=%d --max-mod-rev=%d --keys-only", s.Revision, s.Revision+offset))
			}
		}},
		{name: "etcdctl/protobuf-output", script: func(s *pair.Session) {
			fill(s)
			for _, line := range []string{"get --from-key a", "get a z --limit=1", "get a z --stream"} {
				// Only the terms may differ: let them be equal before they are compared.
				out := s.Launch("", append([]string{etcdctl, "-w", "protobuf"}, strings.Fields(line)...)...).Output()
				answer := &pb.RangeResponse{}
				s.Require(proto.Unmarshal([]byte(out), answer) == nil, "%s prints no range response: %q", line, out)
				s.Note(line, pair.Text(pair.Normalise(answer)))
			}
		}},
		{name: "etcdctl/del", script: func(s *pair.Session) {
			fill(s)
			run(s, "del a", "del a", "del --prev-kv b", "del", "del c e --prev-kv -w json")
			fill(s)
			inFormats(s, "del a --prev-kv", "del none")
			run(s, "del --from-key d --prev-kv", "del --prefix c", "del --prefix", "del --range b c", "del b c d", "del --prefix --from-key x")
			fill(s)
			run(s, "del --from-key=true a", "get --from-key a")
		}},
		{name: "etcdctl/txn", script: func(s *pair.Session) {
			s.Grant(0x10, 1000)
			fill(s)
			for _, input := range []string{
				"\n\n\n", "mod(\"a\") > \"0\"\n\nput a 2\nget a\n\nput a 3\n\n", "value(\"a\") = \"1\"\n\nget a\n\ndel a\nput z 1\n\n",
				"create(\"a\") = \"0\"\nversion(\"b\") < \"5\"\n\nput x 1\n\nget b\n\n", "ver(\"a\") != \"0\"\n\nget --prefix a\nput l v --lease=10\n\n\n",
				"c(\"none\") = \"0\"\n\nput none created\n\n\n", "m(\"a\") = \"x\"\n\n\n\n", "nonsense\n\n\n\n", "\nput a 1\nput a 2\n\n\n", "\nget a --rev=100000\n\n\n", "\nput a\n\n\n", "\nwatch a\n\n\n", "val(\"a\") = \"1\"\n", "",
				"\nput q 1 --prev-kv\ndel q2 --prev-kv\nget --from-key q\n\n\n",
			} {
				for _, format := range formats[:3] {
					s.Run(input, etcdctl, "txn", "-w", format)
				}
				s.Run(input, etcdctl, "txn", "-i")
			}
			s.Range(everything())
		}},
		{name: "etcdctl/compaction", script: func(s *pair.Session) {
			fill(s)
			run(s, fmt.Sprintf("compaction %d", s.Revision+3), fmt.Sprintf("compaction %d", s.Revision+3), fmt.Sprintf("compaction %d --physical", s.Revision+5), "compaction 9999999", "compaction x", "compaction", "compaction 0", "compaction -- -5",
				fmt.Sprintf("get a --rev=%d", s.Revision+1), fmt.Sprintf("compact %d", s.Revision+6), fmt.Sprintf("watch a --rev=%d", s.Revision+1))
		}},
		{name: "etcdctl/lease", script: func(s *pair.Session) {
			s.Grant(0x20, 1000)
			s.Put(leased("a", "1", 0x20))
			inFormats(s, "lease list", "lease timetolive 20", "lease timetolive 20 --keys", "lease timetolive 99", "lease keep-alive 20 --once", "lease keep-alive 99 --once")
			run(s, "lease grant", "lease grant x", "lease grant 1000", "lease grant 0", "lease grant -- -5", "lease grant 9999999999", "lease revoke 99", "lease revoke x", "lease revoke", "lease keep-alive x --once", "lease timetolive x",
				"put b 1 --lease=20", "lease revoke 20", "lease revoke 20 -w json", "get --from-key a", "lease timetolive 20 --keys", "lease keep-alive 20")
		}},
		{name: "etcdctl/lease-keep-alive", script: func(s *pair.Session) {
			s.Grant(0x21, 2)
			c := s.Launch("", etcdctl, "lease", "keep-alive", "21")
			c.Lines(2)
			s.Revoke(0x21)
			c.Lines(1)
			c.Finish()
		}},
		{name: "etcdctl/watch", script: func(s *pair.Session) {
			fill(s)
			s.Delete(del("a", "c"))
			from := fmt.Sprintf("--rev=%d", s.Revision+1)
			for _, c := range []struct {
				lines     int
				arguments []string
			}{
				{12, []string{"watch", from, "a"}},
				{12, []string{"watch", from, "a", "b"}},
				{18, []string{"watch", from, "--prefix", "--prev-kv", "a"}},
				{30, []string{"watch", from, "a", "z"}},
				{8, []string{"watch", from, "b", "--", "sh", "-c", "echo $ETCD_WATCH_REVISION $ETCD_WATCH_EVENT_TYPE $ETCD_WATCH_KEY $ETCD_WATCH_VALUE"}},
				{3, []string{"watch", from, "d", "-w", "fields"}},
				{3, []string{"watch", from, "d", "--hex"}},
				{1, []string{"watch", from, "d", "-w", "json"}},
			} {
				command := s.Launch("", append([]string{etcdctl}, c.arguments...)...)
				command.Lines(c.lines)
				command.Kill()
			}
			run(s, "watch", "watch --prefix a b")
		}},
		{name: "etcdctl/watch-interactive-and-progress", script: func(s *pair.Session) {
			fill(s)
			c := s.Launch("", etcdctl, "watch", "-i")
			c.Write(fmt.Sprintf("watch --rev=%d b", s.Revision+1))
			c.Lines(3)
			c.Write(fmt.Sprintf("watch --rev=%d d -- sh -c \"echo $ETCD_WATCH_KEY\"", s.Revision+3))
			c.Lines(8)
			c.Write("progress")
			c.Lines(1)
			c.Write(fmt.Sprintf("watch --rev=%d a c", s.Revision+1))
			c.Lines(12)
			c.Kill()
		}},
		{name: "etcdctl/watch-environment", script: func(s *pair.Session) {
			s.Put(put("k", "v"))
			c := s.Launch("", "env", "ETCDCTL_WATCH_KEY=k", etcdctl, "watch", fmt.Sprintf("--rev=%d", s.Revision+1))
			c.Lines(3)
			c.Kill()
		}},
		{name: "etcdctl/watch-progress-notify", flags: []string{"--watch-progress-notify-interval", "200ms"}, script: func(s *pair.Session) {
			c := s.Launch("", etcdctl, "watch", "--progress-notify", "k")
			c.Lines(2)
			c.Kill()
		}},
		{name: "etcdctl/endpoint", flags: []string{"--advertise-client-urls", "http://{client}"}, script: func(s *pair.Session) {
			fill(s)
			inFormats(s, "endpoint health", "endpoint hashkv", "endpoint health --cluster", "endpoint hashkv --cluster", "member list", "member list --consistency=s")
			for _, format := range []string{"json", "fields"} {
				run(s, "endpoint status -w "+format, "endpoint status --cluster -w "+format)
			}
			for _, format := range []string{"simple", "table"} {
				out := s.Launch("", etcdctl, "endpoint", "status", "-w", format).Output()
				// Terms and indexes stand as bare numbers here, and sizes have units.
				out = regexp.MustCompile(`[0-9.]+ [kMG]?B`).ReplaceAllString(out, "")
				s.Note("endpoint status -w "+format, strings.Join(strings.FieldsFunc(out, func(r rune) bool { return strings.ContainsRune("0123456789 ─\n", r) }), "~"))
			}
			run(s, fmt.Sprintf("endpoint hashkv --rev=%d", s.Revision+2), "endpoint hashkv --rev=9999999", "version", "defrag", "defrag --cluster", "member list --hex")
			s.Run("", "env", "ETCDCTL_ENDPOINTS=127.0.0.1:1,{client}", etcdctl, "endpoint", "hashkv", "--command-timeout=500ms", "--dial-timeout=500ms")
		}},
		{name: "etcdctl/alarm", fresh: true, script: func(s *pair.Session) {
			inFormats(s, "alarm list")
			s.Alarm(&pb.AlarmRequest{Action: pb.AlarmRequest_ACTIVATE, MemberID: 0x12, Alarm: pb.AlarmType_NOSPACE})
			inFormats(s, "alarm list")
			run(s, "put a 1", "endpoint health", "alarm disarm", "alarm list", "put a 1", "endpoint health")
		}},
		{name: "etcdctl/lock", script: func(s *pair.Session) {
			run(s, "lock name echo locked", "lock name --ttl=5 -- sh -c exit_3", "lock")
			s.Run("", etcdctl, "lock", "name", "sh", "-c", "echo $ETCD_LOCK_KEY $ETCD_LOCK_REV")
			first := s.Launch("", etcdctl, "lock", "contended")
			first.Lines(1)
			second := s.Launch("", etcdctl, "lock", "contended")
			s.Await("the second waits", func() bool {
				answer := &pb.RangeResponse{}
				s.Require(s.Quietly("KV/Range", span("contended/", "contended0"), answer) == nil, "range")
				return answer.Count == 2
			})
			first.Interrupt()
			second.Lines(1)
			second.Interrupt()
			s.Range(with(span("contended/", "contended0"), func(r *pb.RangeRequest) { r.CountOnly = true }))
		}},
		{name: "etcdctl/elect", script: func(s *pair.Session) {
			first := s.Launch("", etcdctl, "elect", "office", "one")
			first.Lines(2)
			listener := s.Launch("", etcdctl, "elect", "-l", "office")
			listener.Lines(2)
			second := s.Launch("", etcdctl, "elect", "office", "two")
			s.Await("the second waits", func() bool {
				answer := &pb.RangeResponse{}
				s.Require(s.Quietly("KV/Range", span("office/", "office0"), answer) == nil, "range")
				return answer.Count == 2
			})
			first.Interrupt()
			second.Lines(2)
			listener.Lines(2)
			second.Interrupt()
			listener.Interrupt()
		}},
		{name: "etcdctl/make-mirror", script: func(s *pair.Session) {
			many(s, 300)
			c := s.Launch("", etcdctl, "make-mirror", "--prefix", "k", "--dest-prefix", "mirror/", "{client}")
			copied := func(count int64, value string) func() bool {
				return func() bool {
					answer := &pb.RangeResponse{}
					s.Require(s.Quietly("KV/Range", span("mirror/", "mirror0"), answer) == nil, "range")
					return answer.Count == count && (value == "" || string(answer.Kvs[0].Value) == value)
				}
			}
			s.Await("the mirror has all", copied(300, ""))
			s.Require(s.Quietly("KV/Txn", do(put("k0000", "new"), del("k0001", ""), put("kx", "1")), &pb.TxnResponse{}) == nil, "txn")
			s.Await("the mirror follows", copied(300, "new"))
			c.Kill()
			mirror := &pb.RangeResponse{}
			s.Require(s.Quietly("KV/Range", span("mirror/", "mirror0"), mirror) == nil, "range")
			for _, kv := range mirror.Kvs {
				s.Note(string(kv.Key), string(kv.Value))
			}
		}},
		{name: "etcdctl/unreachable-and-usage", script: func(s *pair.Session) {
			run(s, "nonsense", "get a -w nonsense", "member remove x", "member add", "role", "user")
		}},
	})
	if _, err := os.Stat(etcdctl); err != nil {
		t.Error(err)
	}
}
