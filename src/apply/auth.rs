//! Authorising commands, and the commands that change users and roles.

use super::{Outcome, Refusal, Reply, Run, guard};
use crate::auth::{Access, Auth, AuthError, Change, Demand, Identity, Right};
use crate::lease;
use crate::proto::skegpb::AuthIssue;
use crate::proto::skegpb::command::Kind;
use crate::storage::StorageError;
use crate::storage::mvcc::KeyRange;
use crate::storage::schema::Family;

/// What a run brings to those who keep tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuthEffect {
    /// A user is given a token by the entry at this index.
    Issued {
        /// Who.
        user: String,
        /// What is known of the token.
        digest: Vec<u8>,
        /// The entry.
        index: u64,
    },
    /// A user's tokens are void.
    UserVoid(String),
    /// All tokens are void.
    AllVoid,
}

impl Run<'_> {
    /// Decides whether the client may ask that; nobody else can change users and roles meanwhile.
    pub(super) fn authorise(
        &mut self,
        command: &Kind,
        who: Option<&Identity>,
    ) -> Result<Result<(), AuthError>, StorageError> {
        if !self.state.auth.read().is_enabled() {
            return Ok(Ok(()));
        }
        let mut demand = guard::demand(command, who.is_some());
        let ids = guard::leases(command);
        if !ids.is_empty() && self.state.auth.read().asks_for_attached_keys(who) {
            // The attached keys are read by an iterator of the store below.
            self.make_visible()?;
            for id in ids {
                for key in lease::attached_keys(self.store.engine(), id)? {
                    demand.add(Access { right: Right::Write, range: KeyRange::single(key) });
                }
            }
        }
        Ok(self.state.auth.read().authorise(who, &demand))
    }

    /// Applies a command that changes users and roles, or gives a token; another one does nothing.
    pub(super) fn change_auth(&mut self, command: Kind, index: u64) -> Outcome {
        let mut effect = None;
        let changed = match command {
            Kind::AuthIssue(AuthIssue { user, digest }) => {
                let checked = self.state.auth.read().check_issue(&user);
                effect = Some(AuthEffect::Issued { user, digest: digest.to_vec(), index });
                checked.map(|()| Vec::new())
            }
            Kind::AuthEnable(_) => self.auth(Auth::enable),
            Kind::AuthDisable(_) => {
                effect = Some(AuthEffect::AllVoid);
                self.auth(Auth::disable)
            }
            Kind::UserAdd(user) => {
                self.auth(|auth| auth.add_user(&user.name, user.password_hash, user.no_password))
            }
            Kind::UserDelete(request) => {
                let changed = self.auth(|auth| auth.delete_user(&request.name));
                effect = Some(AuthEffect::UserVoid(request.name));
                changed
            }
            Kind::UserChangePassword(request) => {
                let changed = self.auth(|auth| auth.change_password(&request.name, request.password_hash));
                effect = Some(AuthEffect::UserVoid(request.name));
                changed
            }
            Kind::UserGrantRole(request) => self.auth(|auth| auth.grant_role(&request.user, &request.role)),
            Kind::UserRevokeRole(request) => self.auth(|auth| auth.revoke_role(&request.name, &request.role)),
            Kind::RoleAdd(request) => self.auth(|auth| auth.add_role(&request.name)),
            Kind::RoleDelete(request) => self.auth(|auth| auth.delete_role(&request.role)),
            Kind::RoleGrantPermission(request) => {
                self.auth(|auth| auth.grant_permission(&request.name, request.perm))
            }
            Kind::RoleRevokePermission(request) => {
                self.auth(|auth| auth.revoke_permission(&request.role, &request.key, &request.range_end))
            }
            _ => return Ok(Reply::None),
        };
        let changes = changed.map_err(Refusal::Auth)?;
        self.effects.auth_changed |= !changes.is_empty();
        for Change { key, value } in changes {
            match value {
                Some(value) => self.write.batch().put(Family::Meta, &key, &value),
                None => self.write.batch().delete(Family::Meta, &key),
            }
        }
        self.effects.auth.extend(effect);
        Ok(Reply::Auth { revision: self.write.revision(), index })
    }

    fn auth(
        &self,
        change: impl FnOnce(&mut Auth) -> Result<Vec<Change>, AuthError>,
    ) -> Result<Vec<Change>, AuthError> {
        change(&mut self.state.auth.write())
    }
}

impl Demand {
    /// Adds a key to what is demanded.
    fn add(&mut self, access: Access) {
        if let Demand::Keys(accesses) | Demand::AttachedKeys(accesses) = self {
            accesses.push(access);
        }
    }
}
