package load

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"

	"crypto/tls"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

var transport = sync.OnceValue(func() *http2.Transport {
	return &http2.Transport{
		AllowHTTP: true,
		DialTLSContext: func(ctx context.Context, network, address string, _ *tls.Config) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, address)
		},
	}
})

// listUnary reads the whole list in one answer and throws its bytes away as they come: a gRPC client would hold all of it. The keys
// are not counted, the length of the message is checked against what was received.
func listUnary(ctx context.Context, _ *grpc.ClientConn, s Settings) (int, error) {
	encoded, err := proto.Marshal(&pb.RangeRequest{Key: []byte(KeyPrefix), RangeEnd: prefixEnd()})
	if err != nil {
		return 0, err
	}
	frame := append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(encoded))), encoded...)
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+s.Address+rangePath, bytes.NewReader(frame))
	if err != nil {
		return 0, err
	}
	request.Header.Set("Content-Type", "application/grpc")
	request.Header.Set("TE", "trailers")
	response, err := transport().RoundTrip(request)
	if err != nil {
		return 0, err
	}
	defer func() { _ = response.Body.Close() }()
	var prefix [5]byte
	if _, err = io.ReadFull(response.Body, prefix[:]); err != nil {
		return 0, fmt.Errorf("%w: status %q, %s", err, response.Header.Get("Grpc-Status"), response.Header.Get("Grpc-Message"))
	}
	received, err := io.Copy(io.Discard, response.Body)
	if err != nil {
		return 0, err
	}
	promised := int64(binary.BigEndian.Uint32(prefix[1:]))
	status := response.Trailer.Get("Grpc-Status")
	if status != "0" || received != promised || received < int64(s.Keys)*int64(s.ValueBytes) {
		return 0, fmt.Errorf("received %d bytes of %d, status %q", received, promised, status)
	}
	return s.Keys, nil
}
