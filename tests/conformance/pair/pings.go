package pair

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// Pinging is a connection whose pings are the script's own.
type Pinging struct {
	s          *Session
	connection net.Conn
	framer     *http2.Framer
	encoder    *hpack.Encoder
	block      bytes.Buffer
	nextStream uint32
	pings      byte
	gone       bool
}

// Pinging opens a connection.
func (s *Session) Pinging() *Pinging {
	ctx, cancel := context.WithTimeout(s.ctx, AnswerLimit)
	defer cancel()
	connection, err := (&net.Dialer{}).DialContext(ctx, "tcp", s.Store.ClientAddress)
	s.Require(err == nil, "connect: %v", err)
	p := &Pinging{s: s, connection: connection, framer: http2.NewFramer(connection, connection), nextStream: 1}
	p.framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	p.encoder = hpack.NewEncoder(&p.block)
	_, err = io.WriteString(connection, http2.ClientPreface)
	s.Require(err == nil && p.framer.WriteSettings() == nil, "preface: %v", err)
	return p
}

// Open starts a call with one message and leaves it half open; with end it half-closes it.
func (p *Pinging) Open(path string, message []byte, end bool) {
	p.block.Reset()
	for _, header := range [][2]string{{":method", "POST"}, {":scheme", "http"}, {":path", path}, {":authority", "store"}, {"content-type", "application/grpc"}, {"te", "trailers"}} {
		_ = p.encoder.WriteField(hpack.HeaderField{Name: header[0], Value: header[1]})
	}
	err := p.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: p.nextStream, BlockFragment: p.block.Bytes(), EndHeaders: true})
	if err == nil {
		err = p.framer.WriteData(p.nextStream, end, append([]byte{0, 0, 0, 0, byte(len(message))}, message...))
	}
	p.s.record(fmt.Sprintf("pinging> %s", path), fmt.Sprint(err == nil))
	p.nextStream += 2
}

// Ping sends pings with a pause before each, and records how many were answered and how the connection ended, if it did.
func (p *Pinging) Ping(count int, pause time.Duration) {
	answered, end := 0, "open"
	for range count {
		if p.gone {
			break
		}
		time.Sleep(pause)
		p.pings++
		if p.framer.WritePing(false, [8]byte{p.pings}) != nil {
			p.gone, end = true, "not writable"
			break
		}
		if end = p.untilAcknowledged(p.pings); p.gone {
			break
		}
		answered++
	}
	p.s.record(fmt.Sprintf("pinging> %d with pauses of %v", count, pause), fmt.Sprintf("%d answered, %s", answered, end))
}

// Answered reads until a stream has ended.
func (p *Pinging) Answered() {
	for {
		switch frame := p.read().(type) {
		case nil:
			p.s.record("pinging<", "no answer")
			return
		case *http2.MetaHeadersFrame:
			if frame.StreamEnded() {
				p.s.record("pinging<", "answered")
				return
			}
		}
	}
}

// Close ends the connection.
func (p *Pinging) Close() { _ = p.connection.Close() }

// untilAcknowledged reads until a ping is acknowledged or the connection ends. A ping that is answered by GOAWAY counts as the end, whichever comes first.
func (p *Pinging) untilAcknowledged(ping byte) string {
	acknowledged := false
	for {
		if acknowledged {
			// A GOAWAY comes right behind.
			_ = p.connection.SetReadDeadline(time.Now().Add(30 * time.Millisecond))
		} else {
			_ = p.connection.SetReadDeadline(time.Now().Add(AnswerLimit))
		}
		frame, err := p.framer.ReadFrame()
		if err != nil {
			if acknowledged && isTimeout(err) {
				return "open"
			}
			p.gone = true
			return "ended without a word"
		}
		switch frame := frame.(type) {
		case *http2.PingFrame:
			acknowledged = acknowledged || frame.IsAck() && frame.Data[0] == ping
		case *http2.GoAwayFrame:
			p.gone = true
			return fmt.Sprintf("GOAWAY %v %q, last stream %d", frame.ErrCode, frame.DebugData(), frame.LastStreamID)
		case *http2.SettingsFrame:
			if !frame.IsAck() {
				_ = p.framer.WriteSettingsAck()
			}
		}
	}
}

func (p *Pinging) read() http2.Frame {
	_ = p.connection.SetReadDeadline(time.Now().Add(AnswerLimit))
	frame, err := p.framer.ReadFrame()
	if err != nil {
		return nil
	}
	return frame
}

func isTimeout(err error) bool {
	timeout, ok := err.(net.Error)
	return ok && timeout.Timeout()
}
