package pair

import (
	"context"
	"net"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// Lie changes the encoded answer of a method, or puts an error in its place.
type Lie func(method string, answer []byte) ([]byte, error)

// Through returns the store as it looks to a client behind a proxy that lies, and a function that ends the proxy. It shows that the
// tests notice what they are there to notice.
func (s *Store) Through(lie Lie) (*Store, func(), error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil, err
	}
	proxy := grpc.NewServer(grpc.ForceServerCodec(bytesCodec{}), grpc.MaxRecvMsgSize(1<<30), grpc.UnknownServiceHandler(func(_ any, client grpc.ServerStream) error {
		return s.forward(client, lie)
	}))
	go func() { _ = proxy.Serve(listener) }()
	seen := *s
	seen.ClientAddress = listener.Addr().String()
	seen.Conn, err = grpc.NewClient(seen.ClientAddress, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(1<<30)))
	if err != nil {
		proxy.Stop()
		return nil, nil, err
	}
	return &seen, func() {
		_ = seen.Conn.Close()
		proxy.Stop()
	}, nil
}

func (s *Store) forward(client grpc.ServerStream, lie Lie) error {
	method, _ := grpc.MethodFromServerStream(client)
	received, _ := metadata.FromIncomingContext(client.Context())
	ctx, cancel := context.WithCancel(metadata.NewOutgoingContext(client.Context(), received))
	defer cancel()
	server, err := s.Conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method, grpc.ForceCodec(bytesCodec{}))
	if err != nil {
		return err
	}
	go func() {
		for {
			var request []byte
			if client.RecvMsg(&request) != nil {
				_ = server.CloseSend()
				return
			}
			if server.SendMsg(&request) != nil {
				return
			}
		}
	}()
	for {
		var answer []byte
		if err := server.RecvMsg(&answer); err != nil {
			if answer, ok := status.FromError(err); ok {
				return answer.Err()
			}
			return nil
		}
		if answer, err = lie(method, answer); err != nil {
			return err
		}
		if err := client.SendMsg(&answer); err != nil {
			return err
		}
	}
}
