package pair

import (
	"compress/gzip"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// shownHeaders are the response headers that must be equal.
var shownHeaders = []string{
	"Access-Control-Allow-Headers", "Access-Control-Allow-Methods", "Access-Control-Allow-Origin", "Allow", "Content-Encoding", "Content-Type", "Location",
	"X-Content-Type-Options",
}

// HTTP asks for a path on the client listener and records status, headers and body. Lines of the health checks have no
// order and are sorted.
func (s *Session) HTTP(method, path string) {
	asked := method + " " + path
	request, err := http.NewRequestWithContext(s.ctx, method, s.Store.URL(path), nil)
	s.Require(err == nil, "request: %v", err)
	client := http.Client{Timeout: AnswerLimit, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	response, err := client.Do(request)
	if err != nil {
		s.record(asked, "no answer")
		return
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	s.Require(err == nil, "body: %v", err)
	text := string(body)
	if strings.Contains(text, "[+]") || strings.Contains(text, "[-]") {
		lines := strings.Split(text, "\n")
		slices.Sort(lines)
		text = strings.Join(lines, "\n")
	}
	s.record(asked, fmt.Sprintf("%s %s %q", response.Status, headers(response), text))
}

// MetricsAs asks for the metrics with a header of the request and records status and headers; the body must be metrics.
func (s *Session) MetricsAs(name, value string) {
	request, err := http.NewRequestWithContext(s.ctx, http.MethodGet, s.Store.URL("/metrics"), nil)
	s.Require(err == nil, "request: %v", err)
	// Set in any case: else the client asks for gzip and hides it.
	request.Header.Set("Accept-Encoding", "identity")
	request.Header.Set(name, value)
	response, err := http.DefaultClient.Do(request)
	s.Require(err == nil, "metrics: %v", err)
	defer func() { _ = response.Body.Close() }()
	body := io.Reader(response.Body)
	if response.Header.Get("Content-Encoding") == "gzip" {
		body, err = gzip.NewReader(body)
		s.Require(err == nil, "gzip: %v", err)
	}
	text, err := io.ReadAll(body)
	s.Require(err == nil && strings.Contains(string(text), "\netcd_server_has_leader 1\n"), "metrics: %v %s", err, text)
	s.record("metrics as "+name+": "+value, response.Status+" "+headers(response))
}

// headers shows those that must be equal.
func headers(response *http.Response) string {
	var shown []string
	for _, name := range shownHeaders {
		if value, present := response.Header[name]; present {
			shown = append(shown, fmt.Sprintf("%s=%q", name, value))
		}
	}
	return strings.Join(shown, " ")
}

// Metrics reads /metrics and returns the value of each series, by name and labels as they stand.
func (s *Session) Metrics() (map[string]string, map[string]string) {
	values, types, err := s.Store.Metrics()
	s.Require(err == nil, "metrics: %v", err)
	return values, types
}

// Metrics reads /metrics: the value of each series, by name and labels as they stand, and the type of each metric.
func (s *Store) Metrics() (values, types map[string]string, err error) {
	response, err := http.Get(s.URL("/metrics"))
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return nil, nil, err
	}
	values, types = map[string]string{}, map[string]string{}
	for line := range strings.Lines(string(body)) {
		fields := strings.Fields(line)
		switch {
		case len(fields) == 4 && fields[0] == "#" && fields[1] == "TYPE":
			types[fields[2]] = fields[3]
		case len(fields) >= 2 && fields[0] != "#":
			at := strings.LastIndexByte(strings.TrimSpace(line), ' ')
			text := strings.TrimSpace(line[at:])
			// Go writes large numbers with an exponent; the format takes both.
			if number, err := strconv.ParseFloat(text, 64); err == nil {
				text = strconv.FormatFloat(number, 'f', -1, 64)
			}
			values[strings.TrimSpace(line[:at])] = text
		}
	}
	return values, types, nil
}
