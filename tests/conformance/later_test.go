package conformance

import (
	"strings"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"skeg.local/conformance/pair"
)

// later lists the RPCs that skeg does not serve yet. Each must answer UNIMPLEMENTED with its name; the change that brings one takes it out
// of here and puts scenarios for it into a file of their own.
var later = []string{
	"/etcdserverpb.Maintenance/Downgrade",
}

func TestLaterRPCs(t *testing.T) {
	stores := freshPair(t)
	onlySkeg(t, stores.Skeg)
	s := pair.NewSession(stores.Skeg)
	for _, path := range later {
		t.Run(strings.TrimPrefix(path, "/"), func(t *testing.T) {
			err := s.Ask(path, nil)
			method := path[strings.LastIndexByte(path, '/')+1:]
			if status.Code(err) != codes.Unimplemented || !strings.Contains(status.Convert(err).Message(), method) {
				t.Errorf("%s: %v", path, err)
			}
		})
	}
	// Each is refused without harm.
	if err := s.Quietly("KV/Put", put("a", "1"), &pb.PutResponse{}); err != nil {
		t.Error(err)
	}
}
