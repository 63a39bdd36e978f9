package pair

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/url"
	"strings"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// HTTP2 posts a body with exactly these headers over HTTP/2 without TLS, half-closes, and records what comes back: the HTTP status, content type,
// gRPC status and message, and the size of the body. It writes frames itself, for an HTTP client refuses to send much of what it is used for.
func (s *Session) HTTP2(path string, headers [][2]string, body []byte) {
	ctx, cancel := context.WithTimeout(s.ctx, AnswerLimit)
	defer cancel()
	asked := fmt.Sprintf("http2 %s %q %s", path, headers, Bytes(body))
	answer, err := post(ctx, s.Store.ClientAddress, path, headers, body)
	if err != nil {
		s.record(asked, "no answer: "+err.Error())
		return
	}
	s.record(asked, answer)
}

func post(ctx context.Context, address, path string, headers [][2]string, body []byte) (string, error) {
	connection, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err != nil {
		return "", err
	}
	defer func() { _ = connection.Close() }()
	if deadline, ok := ctx.Deadline(); ok {
		_ = connection.SetDeadline(deadline)
	}
	if _, err = io.WriteString(connection, http2.ClientPreface); err != nil {
		return "", err
	}
	framer := http2.NewFramer(connection, connection)
	framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	if err = framer.WriteSettings(); err != nil {
		return "", err
	}
	var block bytes.Buffer
	encoder := hpack.NewEncoder(&block)
	all := append([][2]string{{":method", "POST"}, {":scheme", "http"}, {":path", path}, {":authority", address}}, headers...)
	for _, header := range all {
		_ = encoder.WriteField(hpack.HeaderField{Name: header[0], Value: header[1]})
	}
	if err = framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block.Bytes(), EndHeaders: true}); err != nil {
		return "", err
	}
	if err = framer.WriteData(1, true, body); err != nil {
		return "", err
	}
	return readAnswer(framer)
}

func readAnswer(framer *http2.Framer) (string, error) {
	shown := map[string]bool{":status": true, "content-type": true, "grpc-status": true, "grpc-message": true, "grpc-encoding": true}
	var fields []string
	size := 0
	for {
		next, err := framer.ReadFrame()
		if err != nil {
			return "", fmt.Errorf("connection ended")
		}
		ended := false
		switch next := next.(type) {
		case *http2.SettingsFrame:
			if !next.IsAck() {
				if err = framer.WriteSettingsAck(); err != nil {
					return "", err
				}
			}
		case *http2.MetaHeadersFrame:
			for _, field := range next.Fields {
				// Which characters of a message are escaped is left open; an empty one may be left out.
				value, err := url.PathUnescape(field.Value)
				if err == nil && shown[field.Name] && value != "" {
					fields = append(fields, field.Name+"="+undecodable(value))
				}
			}
			ended = next.StreamEnded()
		case *http2.DataFrame:
			size += len(next.Data())
			ended = next.StreamEnded()
		case *http2.RSTStreamFrame:
			if size == 0 && len(fields) == 0 {
				fields = append(fields, "reset="+next.ErrCode.String())
			}
			ended = true
		case *http2.GoAwayFrame:
			return "", fmt.Errorf("goaway %v", next.ErrCode)
		}
		if ended {
			return fmt.Sprintf("%s and %d bytes", strings.Join(fields, " "), size), nil
		}
	}
}

// undecodable cuts off the decoder's own words about a message.
func undecodable(message string) string {
	for _, start := range []string{"grpc: error unmarshalling request: ", "grpc: failed to unmarshal the received message: ", "grpc: failed to decompress the message: "} {
		if strings.HasPrefix(message, start) {
			return start + "…"
		}
	}
	return message
}
