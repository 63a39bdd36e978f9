//! Tokens: what a client shows instead of its password. Not replicated: each member keeps, or verifies, its own.
//!
//! | kind | is | ends |
//! |---|---|---|
//! | simple | 16 letters, a dot, the index of the log entry that issued it | some time after its last use on this member; with a restart; when the user's password changes or the user goes; when authentication is turned off |
//! | JWT | user and auth revision, signed | at a time that it says; for keys, with the next change of users and roles |
//! | none | nothing: nobody can log in | |
//!
//! Of a simple token the log and the members hold the SHA-256 of its letters, which nobody can make a token of; finding a
//! token by that takes no longer for a guess that is nearly right.

mod jwt;
mod keys;
mod simple;

use std::time::Duration;

use crate::clock;

pub use jwt::{Jwt, SignError};
pub use simple::{Secret, Simple};

/// The life of a simple token unless told otherwise.
pub const TTL_DEFAULT: Duration = Duration::from_secs(300);

/// How tokens are made. From `--auth-token`.
pub enum Tokens {
    /// Not at all.
    None,
    /// Kept here.
    Simple(Simple),
    /// Signed.
    Jwt(Box<Jwt>),
}

/// A change that the log brings to the tokens of every member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenChange {
    /// A user has a new one.
    Issued {
        /// SHA-256 of the letters.
        digest: Vec<u8>,
        /// Whose it is.
        user: String,
        /// The entry.
        index: u64,
    },
    /// A user's are void.
    UserVoid(String),
    /// All are void.
    AllVoid,
}

impl Tokens {
    /// Reads what `--auth-token` says.
    ///
    /// # Errors
    /// What is wrong with it, without what it says.
    pub fn from_setting(setting: &str, ttl: Duration) -> Result<Tokens, String> {
        let mut parts = setting.split(',');
        let kind = parts.next().unwrap_or_default();
        let mut options = std::collections::BTreeMap::new();
        for part in parts {
            let pair = part.split_once('=').filter(|(_, value)| !value.contains('='));
            let Some((name, value)) = pair else {
                return Err(AUTH_OPTIONS.to_owned());
            };
            if options.insert(name.to_owned(), value.to_owned()).is_some() {
                return Err(AUTH_OPTIONS.to_owned());
            }
        }
        match kind {
            "simple" => Ok(Tokens::Simple(Simple::new(ttl))),
            "" => Ok(Tokens::None),
            "jwt" => Ok(Tokens::Jwt(Box::new(Jwt::from_options(&options)?))),
            _ => Err(AUTH_OPTIONS.to_owned()),
        }
    }

    /// Follows the log.
    pub fn follow(&self, change: TokenChange) {
        if let Tokens::Simple(simple) = self {
            simple.follow(change, clock::now());
        }
    }

    /// Reads the keys again that tokens are signed with; true if there is another one.
    ///
    /// # Errors
    /// What is wrong with them; the ones before are used on.
    pub fn reload(&self) -> Result<bool, String> {
        match self {
            Tokens::Jwt(jwt) => jwt.reload(),
            Tokens::None | Tokens::Simple(_) => Ok(false),
        }
    }

    /// Leaves tokens out that were issued by entries before this one: they were issued in an earlier life of the member.
    pub fn begin_at(&self, index: u64) {
        if let Tokens::Simple(simple) = self {
            simple.begin_at(index);
        }
    }
}

/// etcd's words for options that are none. etcd: `ErrInvalidAuthOpts`.
const AUTH_OPTIONS: &str = "auth: invalid auth options";
