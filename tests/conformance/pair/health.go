package pair

import (
	"context"

	"google.golang.org/grpc/health/grpc_health_v1"
)

// Health asks grpc.health.v1.Health/Check.
func (s *Session) Health(r *grpc_health_v1.HealthCheckRequest) {
	ctx, cancel := context.WithTimeout(s.ctx, AnswerLimit)
	defer cancel()
	answer, err := grpc_health_v1.NewHealthClient(s.Store.Conn).Check(ctx, r)
	s.recordHealth("Health/Check "+Text(r), answer, err)
}

// HealthList asks grpc.health.v1.Health/List.
func (s *Session) HealthList() {
	ctx, cancel := context.WithTimeout(s.ctx, AnswerLimit)
	defer cancel()
	answer, err := grpc_health_v1.NewHealthClient(s.Store.Conn).List(ctx, &grpc_health_v1.HealthListRequest{})
	s.record("Health/List", ErrorText(err))
	s.Require(err != nil || answer.Statuses[""].GetStatus() == grpc_health_v1.HealthCheckResponse_SERVING, "the server is not in the list of services")
}

// HealthWatch records the first message of grpc.health.v1.Health/Watch.
func (s *Session) HealthWatch(service string) {
	ctx, cancel := context.WithTimeout(s.ctx, AnswerLimit)
	defer cancel()
	stream, err := grpc_health_v1.NewHealthClient(s.Store.Conn).Watch(ctx, &grpc_health_v1.HealthCheckRequest{Service: service})
	var answer *grpc_health_v1.HealthCheckResponse
	if err == nil {
		answer, err = stream.Recv()
	}
	s.recordHealth("Health/Watch "+service, answer, err)
}

func (s *Session) recordHealth(asked string, answer *grpc_health_v1.HealthCheckResponse, err error) {
	if err != nil {
		s.record(asked, ErrorText(err))
		return
	}
	s.record(asked, Text(answer))
}
