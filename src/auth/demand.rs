//! What a request must be allowed to do, and the one function that decides it. etcd: `server/etcdserver/apply/auth.go`.

use bytes::Bytes;

use super::{Auth, AuthError, Identity, User};
use crate::storage::mvcc::KeyRange;

/// What is done with keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Right {
    /// They, or whether they exist, are shown.
    Read,
    /// They are changed.
    Write,
}

/// What is done with which keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    /// What is done.
    pub right: Right,
    /// With these.
    pub range: KeyRange,
}

impl Access {
    /// Reads a range as a request states it.
    pub fn read(key: &Bytes, range_end: &Bytes) -> Access {
        Access { right: Right::Read, range: KeyRange::from_request(key, range_end) }
    }

    /// Changes a range as a request states it.
    pub fn write(key: &Bytes, range_end: &Bytes) -> Access {
        Access { right: Right::Write, range: KeyRange::from_request(key, range_end) }
    }
}

/// What a request needs while authentication is on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Demand {
    /// Nothing: anybody may ask.
    Nothing,
    /// That it is known who asks.
    Known,
    /// The role `root`.
    Root,
    /// To be this user, or the role `root`.
    User(String),
    /// To hold this role, or the role `root`.
    Holder(String),
    /// All of these.
    Keys(Vec<Access>),
    /// All of these, which are keys attached to leases; the role `root` is enough, however old the identity.
    AttachedKeys(Vec<Access>),
}

impl Auth {
    /// Decides whether `who` may do what is demanded; everybody may do everything while authentication is off.
    ///
    /// # Errors
    /// [`AuthError::UserEmpty`], [`AuthError::UserNotFound`], [`AuthError::AuthOldRevision`], [`AuthError::PermissionDenied`].
    pub fn authorise(&self, who: Option<&Identity>, demand: &Demand) -> Result<(), AuthError> {
        if !self.enabled {
            return Ok(());
        }
        let known = who.filter(|who| !who.name.is_empty()).ok_or(AuthError::UserEmpty);
        match demand {
            Demand::Nothing => Ok(()),
            Demand::Known => known.map(|_| ()),
            Demand::Root => self.check_root(known?),
            Demand::User(name) => {
                let who = known?;
                if who.name == *name { Ok(()) } else { self.check_root(who) }
            }
            Demand::Holder(role) => {
                let who = known?;
                self.check_root(who)
                    .or_else(|refused| if self.holds(who, role) { Ok(()) } else { Err(refused) })
            }
            Demand::Keys(accesses) if accesses.is_empty() => Ok(()),
            Demand::Keys(accesses) => self.check_keys(known?, accesses),
            Demand::AttachedKeys(accesses) => {
                let who = known?;
                if accesses.is_empty() || self.check_root(who).is_ok() {
                    return Ok(());
                }
                self.check_keys(who, accesses)
            }
        }
    }

    /// True if what a user may do with a lease depends on the lease's keys.
    pub fn asks_for_attached_keys(&self, who: Option<&Identity>) -> bool {
        self.enabled && who.is_some_and(|who| self.check_root(who).is_err())
    }

    /// True for an identity, or none, that is as new as the last change of users and roles.
    ///
    /// To be asked after a read: what was read before a change must not be shown after it.
    ///
    /// # Errors
    /// [`AuthError::AuthOldRevision`].
    pub fn check_unchanged(&self, who: Option<&Identity>) -> Result<(), AuthError> {
        match who {
            Some(who) if who.auth_revision != self.revision => Err(AuthError::AuthOldRevision),
            _ => Ok(()),
        }
    }

    fn check_root(&self, who: &Identity) -> Result<(), AuthError> {
        let user = self.users.get(&who.name).ok_or(AuthError::UserNotFound)?;
        if user.is_root { Ok(()) } else { Err(AuthError::PermissionDenied) }
    }

    fn holds(&self, who: &Identity, role: &str) -> bool {
        self.users.get(&who.name).is_some_and(|user| user.record.roles.iter().any(|held| held == role))
    }

    fn check_keys(&self, who: &Identity, accesses: &[Access]) -> Result<(), AuthError> {
        // A token can say 0, and no client is recognised by that.
        if who.auth_revision == 0 {
            return Err(AuthError::UserEmpty);
        }
        if who.auth_revision < self.revision {
            return Err(AuthError::AuthOldRevision);
        }
        let user = self.users.get(&who.name).ok_or(AuthError::PermissionDenied)?;
        let allowed = user.is_root || accesses.iter().all(|access| user.may(access));
        if allowed { Ok(()) } else { Err(AuthError::PermissionDenied) }
    }
}

impl User {
    fn may(&self, access: &Access) -> bool {
        match access.right {
            Right::Read => self.reads.covers(&access.range),
            Right::Write => self.writes.covers(&access.range),
        }
    }
}
