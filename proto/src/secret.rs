//! `Debug` of the messages that hold passwords, their hashes or tokens: it shows who, and never the secret.

use std::fmt::{Debug, Formatter, Result};

use crate::authpb::User;
use crate::etcdserverpb::{
    AuthUserAddRequest, AuthUserChangePasswordRequest, AuthenticateRequest, AuthenticateResponse,
};
use crate::skegpb::{AuthIssue, UserAdd, UserChangePassword};

/// Writes the named fields, and that there are others.
macro_rules! debug_without_secrets {
    ($($message:ident { $($field:ident),* })*) => {
        $(impl Debug for $message {
            fn fmt(&self, f: &mut Formatter<'_>) -> Result {
                f.debug_struct(stringify!($message))$(.field(stringify!($field), &self.$field))*.finish_non_exhaustive()
            }
        })*
    };
}

debug_without_secrets! {
    User { name, roles, options }
    AuthenticateRequest { name }
    AuthenticateResponse { header }
    AuthUserAddRequest { name, options }
    AuthUserChangePasswordRequest { name }
    AuthIssue { user }
    UserAdd { name, no_password }
    UserChangePassword { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_secret_is_shown() {
        let secret = "open sesame";
        let shown = [
            format!("{:?}", AuthenticateRequest { name: "a".into(), password: secret.into() }),
            format!("{:?}", AuthenticateResponse { header: None, token: secret.into() }),
            format!(
                "{:?}",
                AuthUserAddRequest {
                    name: "a".into(),
                    password: secret.into(),
                    options: None,
                    hashed_password: secret.into()
                }
            ),
            format!("{:?}", User { name: "a".into(), password: secret.into(), ..User::default() }),
            format!("{:?}", UserChangePassword { name: "a".into(), password_hash: Some(secret.into()) }),
        ];
        for text in shown {
            assert!(!text.contains("sesame") && text.ends_with(".. }"), "{text}");
        }
    }
}
