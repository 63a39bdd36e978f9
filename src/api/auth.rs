//! The Auth service. etcd: `server/etcdserver/v3_server.go`, `server/etcdserver/apply/auth.go`.
//!
//! Changes go through the log. A password is hashed by the member that takes it, before it is proposed: the log and the other
//! members see its hash alone; and none is hashed for who may not ask that. What only asks is answered here, after everything acknowledged before.

use std::sync::Arc;

use tonic::{Request, Response, Status};
use tracing::{info, warn};

use super::Context;
use super::caller::Caller;
use super::error::Error;
use super::kv::unexpected;
use crate::apply::{self, Reply};
use crate::auth::password;
use crate::auth::token::{Secret, Tokens};
use crate::auth::{Auth, AuthError, Demand};
use crate::clock;
use crate::proto::etcdserverpb as pb;
use crate::proto::server::auth_server::Auth as AuthCalls;
use crate::proto::skegpb;
use crate::proto::skegpb::command::Kind;
use crate::telemetry::metrics::Operation;

/// The Auth service.
#[derive(Clone)]
pub(super) struct AuthService(pub(super) Arc<Context>);

/// A call that changes something and answers nothing but a header.
macro_rules! change {
    ($service:ident, $request:ident, $kind:expr, $response:ident, $log:expr) => {{
        let caller = Caller::of(&$request);
        let request = $request.into_inner();
        let log = $log;
        let logged = log(&request);
        let (revision, _) = $service.change(&caller, $kind(request)).await?;
        info!("{logged}");
        Ok(Response::new(pb::$response { header: Some($service.0.header_at(revision)) }))
    }};
}

#[tonic::async_trait]
impl AuthCalls for AuthService {
    async fn auth_enable(
        &self,
        request: Request<pb::AuthEnableRequest>,
    ) -> Result<Response<pb::AuthEnableResponse>, Status> {
        let command = |_| Kind::AuthEnable(skegpb::AuthEnable {});
        change!(self, request, command, AuthEnableResponse, |_: &_| "enabled authentication".to_owned())
    }

    async fn auth_disable(
        &self,
        request: Request<pb::AuthDisableRequest>,
    ) -> Result<Response<pb::AuthDisableResponse>, Status> {
        let command = |_| Kind::AuthDisable(skegpb::AuthDisable {});
        change!(self, request, command, AuthDisableResponse, |_: &_| "disabled authentication".to_owned())
    }

    async fn auth_status(
        &self,
        request: Request<pb::AuthStatusRequest>,
    ) -> Result<Response<pb::AuthStatusResponse>, Status> {
        let caller = Caller::of(&request);
        let (header, (enabled, auth_revision)) = self
            .ask(Operation::AuthStatus, &caller, &Demand::Nothing, |auth| {
                Ok((auth.is_enabled(), auth.revision()))
            })
            .await?;
        Ok(Response::new(pb::AuthStatusResponse { header: Some(header), enabled, auth_revision }))
    }

    async fn authenticate(
        &self,
        request: Request<pb::AuthenticateRequest>,
    ) -> Result<Response<pb::AuthenticateResponse>, Status> {
        let pb::AuthenticateRequest { name, password } = request.into_inner();
        let token = self.log_in(&name, password).await.inspect_err(|error| {
            if *error != Error::Auth(AuthError::AuthNotEnabled) {
                warn!(user = name, %error, "invalid authentication was requested");
            }
        })?;
        Ok(Response::new(pb::AuthenticateResponse { header: Some(self.0.header()), token }))
    }

    async fn user_add(
        &self,
        request: Request<pb::AuthUserAddRequest>,
    ) -> Result<Response<pb::AuthUserAddResponse>, Status> {
        let caller = Caller::of(&request);
        let pb::AuthUserAddRequest { name, password, options, .. } = request.into_inner();
        let no_password = options.is_some_and(|options| options.no_password);
        let password_hash =
            if no_password { bytes::Bytes::new() } else { self.0.passwords.hash(password).await? };
        let added = skegpb::UserAdd { name: name.clone(), password_hash, no_password };
        let (revision, _) = self.change(&caller, Kind::UserAdd(added)).await?;
        info!("user-name" = name, "added a user");
        Ok(Response::new(pb::AuthUserAddResponse { header: Some(self.0.header_at(revision)) }))
    }

    async fn user_get(
        &self,
        request: Request<pb::AuthUserGetRequest>,
    ) -> Result<Response<pb::AuthUserGetResponse>, Status> {
        let caller = Caller::of(&request);
        let name = request.into_inner().name;
        let demand = Demand::User(name.clone());
        let (header, roles) =
            self.ask(Operation::AuthUserGet, &caller, &demand, |auth| auth.user_roles(&name)).await?;
        Ok(Response::new(pb::AuthUserGetResponse { header: Some(header), roles }))
    }

    async fn user_list(
        &self,
        request: Request<pb::AuthUserListRequest>,
    ) -> Result<Response<pb::AuthUserListResponse>, Status> {
        let caller = Caller::of(&request);
        let ask = self.ask(Operation::AuthUserList, &caller, &Demand::Root, |auth| Ok(auth.user_names()));
        let (header, users) = ask.await?;
        Ok(Response::new(pb::AuthUserListResponse { header: Some(header), users }))
    }

    async fn user_delete(
        &self,
        request: Request<pb::AuthUserDeleteRequest>,
    ) -> Result<Response<pb::AuthUserDeleteResponse>, Status> {
        let log = |request: &pb::AuthUserDeleteRequest| format!("deleted user {:?}", request.name);
        change!(self, request, Kind::UserDelete, AuthUserDeleteResponse, log)
    }

    async fn user_change_password(
        &self,
        request: Request<pb::AuthUserChangePasswordRequest>,
    ) -> Result<Response<pb::AuthUserChangePasswordResponse>, Status> {
        let caller = Caller::of(&request);
        let pb::AuthUserChangePasswordRequest { name, password, hashed_password } = request.into_inner();
        let password_hash = if password.is_empty() {
            password::decode_hash(&hashed_password)
        } else {
            Some(self.0.passwords.hash(password).await?)
        };
        let changed = skegpb::UserChangePassword { name: name.clone(), password_hash };
        let (revision, _) = self.change(&caller, Kind::UserChangePassword(changed)).await?;
        info!("user-name" = name, "changed a password of a user");
        Ok(Response::new(pb::AuthUserChangePasswordResponse { header: Some(self.0.header_at(revision)) }))
    }

    async fn user_grant_role(
        &self,
        request: Request<pb::AuthUserGrantRoleRequest>,
    ) -> Result<Response<pb::AuthUserGrantRoleResponse>, Status> {
        let log = |request: &pb::AuthUserGrantRoleRequest| {
            format!("granted role {:?} to user {:?}", request.role, request.user)
        };
        change!(self, request, Kind::UserGrantRole, AuthUserGrantRoleResponse, log)
    }

    async fn user_revoke_role(
        &self,
        request: Request<pb::AuthUserRevokeRoleRequest>,
    ) -> Result<Response<pb::AuthUserRevokeRoleResponse>, Status> {
        let log = |request: &pb::AuthUserRevokeRoleRequest| {
            format!("revoked role {:?} from user {:?}", request.role, request.name)
        };
        change!(self, request, Kind::UserRevokeRole, AuthUserRevokeRoleResponse, log)
    }

    async fn role_add(
        &self,
        request: Request<pb::AuthRoleAddRequest>,
    ) -> Result<Response<pb::AuthRoleAddResponse>, Status> {
        let log = |request: &pb::AuthRoleAddRequest| format!("created role {:?}", request.name);
        change!(self, request, Kind::RoleAdd, AuthRoleAddResponse, log)
    }

    async fn role_get(
        &self,
        request: Request<pb::AuthRoleGetRequest>,
    ) -> Result<Response<pb::AuthRoleGetResponse>, Status> {
        let caller = Caller::of(&request);
        let role = request.into_inner().role;
        let demand = Demand::Holder(role.clone());
        let (header, perm) =
            self.ask(Operation::AuthRoleGet, &caller, &demand, |auth| auth.role_permissions(&role)).await?;
        Ok(Response::new(pb::AuthRoleGetResponse { header: Some(header), perm }))
    }

    async fn role_list(
        &self,
        request: Request<pb::AuthRoleListRequest>,
    ) -> Result<Response<pb::AuthRoleListResponse>, Status> {
        let caller = Caller::of(&request);
        let ask = self.ask(Operation::AuthRoleList, &caller, &Demand::Root, |auth| Ok(auth.role_names()));
        let (header, roles) = ask.await?;
        Ok(Response::new(pb::AuthRoleListResponse { header: Some(header), roles }))
    }

    async fn role_delete(
        &self,
        request: Request<pb::AuthRoleDeleteRequest>,
    ) -> Result<Response<pb::AuthRoleDeleteResponse>, Status> {
        let log = |request: &pb::AuthRoleDeleteRequest| format!("deleted role {:?}", request.role);
        change!(self, request, Kind::RoleDelete, AuthRoleDeleteResponse, log)
    }

    async fn role_grant_permission(
        &self,
        request: Request<pb::AuthRoleGrantPermissionRequest>,
    ) -> Result<Response<pb::AuthRoleGrantPermissionResponse>, Status> {
        let log = |request: &pb::AuthRoleGrantPermissionRequest| {
            format!("granted a permission to role {:?}", request.name)
        };
        change!(self, request, Kind::RoleGrantPermission, AuthRoleGrantPermissionResponse, log)
    }

    async fn role_revoke_permission(
        &self,
        request: Request<pb::AuthRoleRevokePermissionRequest>,
    ) -> Result<Response<pb::AuthRoleRevokePermissionResponse>, Status> {
        let log = |request: &pb::AuthRoleRevokePermissionRequest| {
            format!("revoked a permission from role {:?}", request.role)
        };
        change!(self, request, Kind::RoleRevokePermission, AuthRoleRevokePermissionResponse, log)
    }
}

impl AuthService {
    /// Proposes a change; gives the revision of the keys, and the index of the entry.
    async fn change(&self, caller: &Caller, command: Kind) -> Result<(i64, u64), Status> {
        match self.0.apply_for(caller, command).await? {
            Reply::Auth { revision, index } => Ok((revision, index)),
            other => Err(unexpected(&other)),
        }
    }

    /// Answers a question about users and roles. The header is as old as the answer, or older.
    async fn ask<T>(
        &self,
        operation: Operation,
        caller: &Caller,
        demand: &Demand,
        question: impl FnOnce(&Auth) -> Result<T, AuthError> + Send,
    ) -> Result<(pb::ResponseHeader, T), Status> {
        let started = clock::now();
        let answered = async {
            self.0.node.read_barrier().await?;
            let who = self.0.identify(caller).await?;
            let header = self.0.header();
            let auth = self.0.state.auth.read();
            auth.authorise(who.as_ref(), demand)?;
            Ok::<_, Error>((header, question(&auth)?))
        }
        .await;
        let took = clock::now().duration_since(started);
        self.0.metrics.server.request_duration.observe(operation, answered.is_ok(), took);
        Ok(answered?)
    }

    /// Checks a password and gives a token; again if users or roles have changed meanwhile.
    async fn log_in(&self, name: &str, password: String) -> Result<String, Error> {
        let context = &self.0;
        context.node.read_barrier().await?;
        loop {
            let check = context.state.auth.read().password_check(name)?;
            if !context.passwords.fits(password.clone(), check.hash).await? {
                return Err(AuthError::AuthFailed.into());
            }
            let token = self.issue(name, check.revision).await?;
            if context.state.auth.read().revision() == check.revision {
                return Ok(token);
            }
        }
    }

    /// Gives a token to a user whose password was right as of an auth revision.
    async fn issue(&self, name: &str, checked: u64) -> Result<String, Error> {
        match &*self.0.tokens {
            Tokens::None => Err(AuthError::AuthFailed.into()),
            Tokens::Jwt(tokens) => tokens.sign(name, checked).map_err(Error::Sign),
            Tokens::Simple(_) => {
                let secret = Secret::draw();
                let issue = skegpb::AuthIssue { user: name.to_owned(), digest: secret.digest().into() };
                let command = Kind::AuthIssue(issue);
                let operation = apply::operation(&command);
                let started = clock::now();
                let outcome = self.0.node.propose(command).await;
                let took = clock::now().duration_since(started);
                let success = matches!(outcome, Ok(Ok(_)));
                self.0.metrics.server.request_duration.observe(operation, success, took);
                match outcome?? {
                    Reply::Auth { index, .. } => Ok(secret.token(index)),
                    _ => Err(Error::Stopped),
                }
            }
        }
    }
}
