//! Authentication and authorisation: users, roles and permissions (replicated), who a token belongs to (not replicated).
//!
//! ```text
//! metadata ──> token ──> Identity: a user, and the auth revision by which it was recognised
//! request  ──> Demand: what must be allowed, as a list of (read or write, range of keys)
//! Auth::authorise(identity, demand) ──> Ok, or why not
//! ```
//!
//! Terms: a *user* holds *roles*, a role has *permissions* to read or write ranges of keys; the role `root` allows everything. The
//! *auth revision* counts the changes of all these; an identity of an older one is refused, so that nothing is done under rights
//! that were taken away before it.
//!
//! There is one function that allows, [`Auth::authorise`]. It serves replicated commands when they are applied, where no other
//! change can come between, and local reads, which ask again whether the revision has stayed. A range is allowed if the union of the
//! user's permissions covers it.
//!
//! Records are etcd's, byte for byte, so that snapshots carry them both ways. etcd: `server/auth/store.go`.

mod demand;
pub mod password;
mod records;
pub mod token;

use std::collections::BTreeMap;

use bytes::Bytes;

use crate::proto::authpb;
use crate::storage::mvcc::KeyRanges;

pub use crate::proto::skegpb::Identity;
pub use demand::{Access, Demand, Right};
pub use records::{Change, load};

/// The user that must exist while authentication is on.
pub const ROOT_USER: &str = "root";
/// The role that allows everything.
pub const ROOT_ROLE: &str = "root";

/// Why authentication, authorisation or a change of users and roles is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// Authentication cannot be on without the user `root`.
    #[error("root user does not exist")]
    RootUserNotExist,
    /// Nor without the role `root` for it.
    #[error("root user does not have root role")]
    RootRoleNotExist,
    /// The user's name is in use.
    #[error("user name already exists")]
    UserAlreadyExist,
    /// No name, or nobody said who asks.
    #[error("user name is empty")]
    UserEmpty,
    /// No such user.
    #[error("user name not found")]
    UserNotFound,
    /// The role's name is in use.
    #[error("role name already exists")]
    RoleAlreadyExist,
    /// No such role.
    #[error("role name not found")]
    RoleNotFound,
    /// No name.
    #[error("role name is empty")]
    RoleEmpty,
    /// No such user, or another password.
    #[error("authentication failed, invalid user ID or password")]
    AuthFailed,
    /// The user has no password; or one was given that is no hash.
    #[error("authentication failed, password was given for no password user")]
    NoPasswordUser,
    /// A grant without a permission.
    #[error("permission not given")]
    PermissionNotGiven,
    /// It is not allowed.
    #[error("permission denied")]
    PermissionDenied,
    /// The user does not hold the role.
    #[error("role is not granted to the user")]
    RoleNotGranted,
    /// The role does not have the permission.
    #[error("permission is not granted to the role")]
    PermissionNotGranted,
    /// There is nothing to authenticate for.
    #[error("authentication is not enabled")]
    AuthNotEnabled,
    /// A token that is none, or not any more.
    #[error("invalid auth token")]
    InvalidAuthToken,
    /// A change that would lock everybody out, or a permission for no key.
    #[error("invalid auth management")]
    InvalidAuthMgmt,
    /// The identity is older than the last change of users and roles.
    #[error("revision of auth store is old")]
    AuthOldRevision,
}

/// A user, and what its roles allow.
#[derive(Clone, Debug, Default)]
struct User {
    record: authpb::User,
    is_root: bool,
    reads: KeyRanges,
    writes: KeyRanges,
}

/// Users, roles and whether they are asked for, as of the applied log.
#[derive(Debug)]
pub struct Auth {
    enabled: bool,
    revision: u64,
    users: BTreeMap<String, User>,
    roles: BTreeMap<String, authpb::Role>,
}

/// What must be known to check a password.
pub struct PasswordCheck {
    /// The stored hash; `None` for a user that does not exist.
    pub hash: Option<Bytes>,
    /// The auth revision as of which that is so.
    pub revision: u64,
}

impl Auth {
    /// True while authentication is on.
    pub fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// How often users and roles were changed, and one more.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// All users' names, in the order of their bytes.
    pub fn user_names(&self) -> Vec<String> {
        self.users.keys().cloned().collect()
    }

    /// All roles' names, in the order of their bytes.
    pub fn role_names(&self) -> Vec<String> {
        self.roles.keys().cloned().collect()
    }

    /// A user's roles.
    ///
    /// # Errors
    /// [`AuthError::UserNotFound`].
    pub fn user_roles(&self, name: &str) -> Result<Vec<String>, AuthError> {
        self.users.get(name).map(|user| user.record.roles.clone()).ok_or(AuthError::UserNotFound)
    }

    /// A role's permissions; `root` has one for everything, whatever was granted to it.
    ///
    /// # Errors
    /// [`AuthError::RoleNotFound`].
    pub fn role_permissions(&self, name: &str) -> Result<Vec<authpb::Permission>, AuthError> {
        let role = self.roles.get(name).ok_or(AuthError::RoleNotFound)?;
        if name != ROOT_ROLE {
            return Ok(role.key_permission.clone());
        }
        let everything = authpb::Permission {
            perm_type: authpb::permission::Type::Readwrite as i32,
            key: Bytes::new(),
            range_end: Bytes::from_static(b"\0"),
        };
        Ok(vec![everything])
    }

    /// What a password is to be checked against.
    ///
    /// # Errors
    /// [`AuthError::AuthNotEnabled`]; [`AuthError::NoPasswordUser`].
    pub fn password_check(&self, name: &str) -> Result<PasswordCheck, AuthError> {
        if !self.enabled {
            return Err(AuthError::AuthNotEnabled);
        }
        let user = self.users.get(name).map(|user| &user.record);
        if user.is_some_and(has_no_password) {
            return Err(AuthError::NoPasswordUser);
        }
        Ok(PasswordCheck { hash: user.map(|user| user.password.clone()), revision: self.revision })
    }
}

fn has_no_password(user: &authpb::User) -> bool {
    user.options.as_ref().is_some_and(|options| options.no_password)
}

#[cfg(test)]
mod tests;
