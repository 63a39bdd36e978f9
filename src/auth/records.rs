//! Changing users and roles, and their stored records. Each change gives the records to write.

use std::collections::BTreeMap;

use bytes::Bytes;
use prost::Message;

use super::{Auth, AuthError, ROOT_ROLE, ROOT_USER, User, has_no_password};
use crate::proto::authpb::{self, Permission, permission::Type};
use crate::storage::mvcc::KeyRange;
use crate::storage::schema::{Family, MetaKey};
use crate::storage::{Engine, StorageError};

/// The revision of a store of users to which nothing was done. etcd: `NewAuthStore`.
const FIRST_REVISION: u64 = 1;

/// A record to write: its key in the `meta` family, and what it says; `None` removes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Key.
    pub key: Vec<u8>,
    /// Value.
    pub value: Option<Vec<u8>>,
}

/// What a change writes, or why it is refused.
type Changed = Result<Vec<Change>, AuthError>;

impl Auth {
    /// Turns authentication on; does nothing if it is.
    ///
    /// # Errors
    /// [`AuthError::RootUserNotExist`], [`AuthError::RootRoleNotExist`].
    pub fn enable(&mut self) -> Changed {
        if self.enabled {
            return Ok(Vec::new());
        }
        let root = self.users.get(ROOT_USER).ok_or(AuthError::RootUserNotExist)?;
        if !root.is_root {
            return Err(AuthError::RootRoleNotExist);
        }
        self.enabled = true;
        Ok(vec![self.enabled_record()])
    }

    /// Turns authentication off; does nothing if it is.
    ///
    /// # Errors
    /// None.
    pub fn disable(&mut self) -> Changed {
        if !self.enabled {
            return Ok(Vec::new());
        }
        self.enabled = false;
        let record = self.enabled_record();
        Ok(self.next_revision(vec![record]))
    }

    /// Checks that a user whose password was found right may have a token.
    ///
    /// # Errors
    /// [`AuthError::AuthNotEnabled`], [`AuthError::AuthFailed`].
    pub fn check_issue(&self, name: &str) -> Result<(), AuthError> {
        if !self.enabled {
            return Err(AuthError::AuthNotEnabled);
        }
        let user = self.users.get(name).ok_or(AuthError::AuthFailed)?;
        if has_no_password(&user.record) { Err(AuthError::AuthFailed) } else { Ok(()) }
    }

    /// Adds a user.
    ///
    /// # Errors
    /// [`AuthError::UserEmpty`], [`AuthError::UserAlreadyExist`].
    pub fn add_user(&mut self, name: &str, password: Bytes, no_password: bool) -> Changed {
        if name.is_empty() {
            return Err(AuthError::UserEmpty);
        }
        if self.users.contains_key(name) {
            return Err(AuthError::UserAlreadyExist);
        }
        let record = authpb::User {
            name: Bytes::copy_from_slice(name.as_bytes()),
            password: if no_password { Bytes::new() } else { password },
            roles: Vec::new(),
            options: Some(authpb::UserAddOptions { no_password }),
        };
        let change = self.put_user(record);
        Ok(self.next_revision(vec![change]))
    }

    /// Removes a user.
    ///
    /// # Errors
    /// [`AuthError::InvalidAuthMgmt`] for `root` while authentication is on, [`AuthError::UserNotFound`].
    pub fn delete_user(&mut self, name: &str) -> Changed {
        if self.enabled && name == ROOT_USER {
            return Err(AuthError::InvalidAuthMgmt);
        }
        self.users.remove(name).ok_or(AuthError::UserNotFound)?;
        let change = Change { key: user_key(name), value: None };
        Ok(self.next_revision(vec![change]))
    }

    /// Changes a password; a user without one keeps none. `None` is a hash that could not be read.
    ///
    /// # Errors
    /// [`AuthError::UserNotFound`], [`AuthError::NoPasswordUser`].
    pub fn change_password(&mut self, name: &str, password: Option<Bytes>) -> Changed {
        let mut record = self.user_record(name)?;
        record.password = if has_no_password(&record) {
            Bytes::new()
        } else {
            password.ok_or(AuthError::NoPasswordUser)?
        };
        let change = self.put_user(record);
        Ok(self.next_revision(vec![change]))
    }

    /// Grants a role to a user; does nothing if it is granted. The role `root` need not have been added.
    ///
    /// # Errors
    /// [`AuthError::UserNotFound`], [`AuthError::RoleNotFound`].
    pub fn grant_role(&mut self, name: &str, role: &str) -> Changed {
        let mut record = self.user_record(name)?;
        if role != ROOT_ROLE && !self.roles.contains_key(role) {
            return Err(AuthError::RoleNotFound);
        }
        if record.roles.iter().any(|held| held == role) {
            return Ok(Vec::new());
        }
        record.roles.push(role.to_owned());
        record.roles.sort();
        let change = self.put_user(record);
        Ok(self.next_revision(vec![change]))
    }

    /// Takes a role from a user.
    ///
    /// # Errors
    /// [`AuthError::InvalidAuthMgmt`] for the `root` of `root` while authentication is on, [`AuthError::UserNotFound`],
    /// [`AuthError::RoleNotGranted`].
    pub fn revoke_role(&mut self, name: &str, role: &str) -> Changed {
        if self.enabled && name == ROOT_USER && role == ROOT_ROLE {
            return Err(AuthError::InvalidAuthMgmt);
        }
        let mut record = self.user_record(name)?;
        let held = record.roles.len();
        record.roles.retain(|held| held != role);
        if record.roles.len() == held {
            return Err(AuthError::RoleNotGranted);
        }
        let change = self.put_user(record);
        Ok(self.next_revision(vec![change]))
    }

    /// Adds a role.
    ///
    /// # Errors
    /// [`AuthError::RoleEmpty`], [`AuthError::RoleAlreadyExist`].
    pub fn add_role(&mut self, name: &str) -> Changed {
        if name.is_empty() {
            return Err(AuthError::RoleEmpty);
        }
        if self.roles.contains_key(name) {
            return Err(AuthError::RoleAlreadyExist);
        }
        let role = authpb::Role { name: Bytes::copy_from_slice(name.as_bytes()), key_permission: Vec::new() };
        let changes = self.put_role(name, role);
        Ok(self.next_revision(changes))
    }

    /// Removes a role, also from those who hold it.
    ///
    /// # Errors
    /// [`AuthError::InvalidAuthMgmt`] for `root` while authentication is on, [`AuthError::RoleNotFound`].
    pub fn delete_role(&mut self, name: &str) -> Changed {
        if self.enabled && name == ROOT_ROLE {
            return Err(AuthError::InvalidAuthMgmt);
        }
        self.roles.remove(name).ok_or(AuthError::RoleNotFound)?;
        let mut changes = vec![Change { key: role_key(name), value: None }];
        for mut record in self.holders(name) {
            record.roles.retain(|held| held != name);
            changes.push(self.put_user(record));
        }
        Ok(self.next_revision(changes))
    }

    /// Grants a permission to a role, in the place of the one for the same range, if there is one.
    ///
    /// etcd looks for that one only at the first permission with the same key, so that of several with one key the others are
    /// granted twice, and a right that was taken back this way stays.
    ///
    /// # Errors
    /// [`AuthError::PermissionNotGiven`], [`AuthError::InvalidAuthMgmt`] for a range without keys, [`AuthError::RoleNotFound`].
    pub fn grant_permission(&mut self, name: &str, permission: Option<Permission>) -> Changed {
        let permission = permission.ok_or(AuthError::PermissionNotGiven)?;
        let range = KeyRange::from_request(&permission.key, &permission.range_end);
        if permission.key.is_empty() || range.is_empty() {
            return Err(AuthError::InvalidAuthMgmt);
        }
        let mut role = self.roles.get(name).cloned().ok_or(AuthError::RoleNotFound)?;
        let same =
            |held: &&mut Permission| held.key == permission.key && held.range_end == permission.range_end;
        match role.key_permission.iter_mut().find(same) {
            Some(held) => held.perm_type = permission.perm_type,
            None => role.key_permission.push(permission),
        }
        role.key_permission.sort_by(|a, b| a.key.cmp(&b.key));
        let changes = self.put_role(name, role);
        Ok(self.next_revision(changes))
    }

    /// Takes the permissions for exactly this range from a role.
    ///
    /// # Errors
    /// [`AuthError::RoleNotFound`], [`AuthError::PermissionNotGranted`].
    pub fn revoke_permission(&mut self, name: &str, key: &Bytes, range_end: &Bytes) -> Changed {
        let mut role = self.roles.get(name).cloned().ok_or(AuthError::RoleNotFound)?;
        let held = role.key_permission.len();
        role.key_permission.retain(|held| held.key != *key || held.range_end != *range_end);
        if role.key_permission.len() == held {
            return Err(AuthError::PermissionNotGranted);
        }
        let changes = self.put_role(name, role);
        Ok(self.next_revision(changes))
    }

    fn user_record(&self, name: &str) -> Result<authpb::User, AuthError> {
        self.users.get(name).map(|user| user.record.clone()).ok_or(AuthError::UserNotFound)
    }

    fn holders(&self, role: &str) -> Vec<authpb::User> {
        let holds = |user: &&User| user.record.roles.iter().any(|held| held == role);
        self.users.values().filter(holds).map(|user| user.record.clone()).collect()
    }

    fn put_user(&mut self, record: authpb::User) -> Change {
        let name = String::from_utf8_lossy(&record.name).into_owned();
        let change = Change { key: user_key(&name), value: Some(record.encode_to_vec()) };
        let user = self.user(record);
        self.users.insert(name, user);
        change
    }

    fn put_role(&mut self, name: &str, role: authpb::Role) -> Vec<Change> {
        let change = Change { key: role_key(name), value: Some(role.encode_to_vec()) };
        self.roles.insert(name.to_owned(), role);
        for record in self.holders(name) {
            let user = self.user(record);
            self.users.insert(String::from_utf8_lossy(&user.record.name).into_owned(), user);
        }
        vec![change]
    }

    /// Works out what a user's roles allow.
    fn user(&self, record: authpb::User) -> User {
        let mut user = User { is_root: record.roles.iter().any(|role| role == ROOT_ROLE), ..User::default() };
        let roles = record.roles.iter().filter_map(|role| self.roles.get(role));
        for permission in roles.flat_map(|role| &role.key_permission) {
            let range = KeyRange::from_request(&permission.key, &permission.range_end);
            match Type::try_from(permission.perm_type) {
                Ok(Type::Read) => user.reads.insert(&range),
                Ok(Type::Write) => user.writes.insert(&range),
                Ok(Type::Readwrite) => {
                    user.reads.insert(&range);
                    user.writes.insert(&range);
                }
                // Of another kind, which allows nothing.
                Err(_) => {}
            }
        }
        user.record = record;
        user
    }

    fn next_revision(&mut self, mut changes: Vec<Change>) -> Vec<Change> {
        self.revision += 1;
        let value = Some(self.revision.to_be_bytes().to_vec());
        changes.push(Change { key: MetaKey::AuthRevision.encode(), value });
        changes
    }

    fn enabled_record(&self) -> Change {
        Change { key: MetaKey::AuthEnabled.encode(), value: Some(vec![u8::from(self.enabled)]) }
    }
}

fn user_key(name: &str) -> Vec<u8> {
    [MetaKey::AUTH_USER_PREFIX, name.as_bytes()].concat()
}

fn role_key(name: &str) -> Vec<u8> {
    [MetaKey::AUTH_ROLE_PREFIX, name.as_bytes()].concat()
}

impl Default for Auth {
    /// No users, no roles, and nobody is asked.
    fn default() -> Auth {
        Auth { enabled: false, revision: FIRST_REVISION, users: BTreeMap::new(), roles: BTreeMap::new() }
    }
}

/// Reads the records.
///
/// # Errors
/// [`StorageError::Damaged`] for a record that does not decode, and the storage's.
pub fn load(engine: &Engine) -> Result<Auth, StorageError> {
    let mut auth = Auth::default();
    if let Some(enabled) = engine.get(Family::Meta, &MetaKey::AuthEnabled.encode())? {
        auth.enabled = *enabled == [1];
    }
    if let Some(revision) = engine.get(Family::Meta, &MetaKey::AuthRevision.encode())? {
        let bytes = (*revision).try_into().map_err(|_| StorageError::Damaged { what: "auth revision" })?;
        // etcd reads 0 before it has written any.
        auth.revision = u64::from_be_bytes(bytes).max(FIRST_REVISION);
    }
    for_each(engine, MetaKey::AUTH_ROLE_PREFIX, |name, value| {
        let role = authpb::Role::decode(value).map_err(|_| StorageError::Damaged { what: "role" })?;
        auth.roles.insert(text(name, "role")?, role);
        Ok(())
    })?;
    let mut records = Vec::new();
    for_each(engine, MetaKey::AUTH_USER_PREFIX, |name, value| {
        let record = authpb::User::decode(value).map_err(|_| StorageError::Damaged { what: "user" })?;
        records.push((text(name, "user")?, record));
        Ok(())
    })?;
    for (name, record) in records {
        let user = auth.user(record);
        auth.users.insert(name, user);
    }
    Ok(auth)
}

fn text(name: &[u8], what: &'static str) -> Result<String, StorageError> {
    std::str::from_utf8(name).map(str::to_owned).map_err(|_| StorageError::Damaged { what })
}

fn for_each(
    engine: &Engine,
    prefix: &[u8],
    mut visit: impl FnMut(&[u8], &[u8]) -> Result<(), StorageError>,
) -> Result<(), StorageError> {
    let mut iterator = engine.iterate(Family::Meta, prefix, None);
    while let Some((key, value)) = iterator.item() {
        let Some(name) = key.strip_prefix(prefix) else { break };
        visit(name, value)?;
        iterator.next();
    }
    Ok(iterator.status()?)
}
