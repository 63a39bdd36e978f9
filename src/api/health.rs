//! The standard gRPC health service.

use std::collections::BTreeMap;

use futures::StreamExt;
use futures::stream::{self, BoxStream};
use tonic::{Request, Response, Status};

use crate::proto::health as pb;
use crate::proto::health::health_check_response::ServingStatus;
use crate::proto::server::health_server::Health;

/// Knows one service, the empty name: serving for as long as it can be asked.
#[derive(Clone)]
pub(super) struct HealthService;

#[tonic::async_trait]
impl Health for HealthService {
    type WatchStream = BoxStream<'static, Result<pb::HealthCheckResponse, Status>>;

    async fn check(
        &self,
        request: Request<pb::HealthCheckRequest>,
    ) -> Result<Response<pb::HealthCheckResponse>, Status> {
        if request.into_inner().service.is_empty() {
            Ok(Response::new(answer(ServingStatus::Serving)))
        } else {
            Err(Status::not_found("unknown service"))
        }
    }

    async fn list(
        &self,
        _: Request<pb::HealthListRequest>,
    ) -> Result<Response<pb::HealthListResponse>, Status> {
        let statuses = BTreeMap::from([(String::new(), answer(ServingStatus::Serving))]);
        Ok(Response::new(pb::HealthListResponse { statuses }))
    }

    async fn watch(
        &self,
        request: Request<pb::HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let known = request.into_inner().service.is_empty();
        let status = if known { ServingStatus::Serving } else { ServingStatus::ServiceUnknown };
        Ok(Response::new(stream::once(async move { Ok(answer(status)) }).chain(stream::pending()).boxed()))
    }
}

fn answer(status: ServingStatus) -> pb::HealthCheckResponse {
    pb::HealthCheckResponse { status: status as i32 }
}
