package pair

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// shownHeaders are the response headers that must be equal.
var shownHeaders = []string{
	"Access-Control-Allow-Headers", "Access-Control-Allow-Methods", "Access-Control-Allow-Origin", "Allow", "Content-Type", "X-Content-Type-Options",
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
	var headers []string
	for _, name := range shownHeaders {
		if value, present := response.Header[name]; present {
			headers = append(headers, fmt.Sprintf("%s=%q", name, value))
		}
	}
	text := string(body)
	if strings.Contains(text, "[+]") || strings.Contains(text, "[-]") {
		lines := strings.Split(text, "\n")
		slices.Sort(lines)
		text = strings.Join(lines, "\n")
	}
	s.record(asked, fmt.Sprintf("%s %s %q", response.Status, strings.Join(headers, " "), text))
}

// Metrics reads /metrics and returns the value of each series, by name and labels as they stand.
func (s *Session) Metrics() (map[string]string, map[string]string) {
	response, err := http.Get(s.Store.URL("/metrics"))
	s.Require(err == nil, "metrics: %v", err)
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	s.Require(err == nil, "metrics: %v", err)
	values, types := map[string]string{}, map[string]string{}
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
	return values, types
}
