//! Who asks: from the metadata of a call to an identity. etcd: `AuthInfoFromCtx` in `server/auth/store.go`.
//!
//! ```text
//! headers ──> Caller (as shown) ──> identify: token, else common name ──> Identity ──> judged, or proposed with the command
//! ```

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use tonic::Status;

use super::Context;
use super::error::Error;
use crate::apply::guard;
use crate::auth::token::{Simple, Tokens};
use crate::auth::{Access, AuthError, Demand, Identity, Right};
use crate::proto::skegpb::command::Kind;
use crate::storage::mvcc::KeyRange;

/// How long a token waits for the entry that it names. etcd waits as long as the client does.
const ISSUED_WITHIN: Duration = Duration::from_secs(1);
/// The metadata that a gateway in front sets: whose connection it is says nothing about the client then.
const GATEWAY: &str = "grpcgateway-accept";

/// The common name of the certificate that a connection's client was verified by; put into a request's extensions by who
/// accepted the connection.
#[derive(Clone, Debug)]
pub struct CommonName(pub Arc<str>);

/// What a call shows of who makes it.
#[derive(Clone, Default)]
pub(super) struct Caller {
    /// Of the metadata; may be anything.
    token: Option<Arc<str>>,
    common_name: Option<Arc<str>>,
}

impl fmt::Debug for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let token = self.token.as_ref().map(|_| "shown");
        f.debug_struct("Caller").field("token", &token).field("common_name", &self.common_name).finish()
    }
}

impl Caller {
    /// Reads the metadata of a call.
    pub(super) fn read(headers: &HeaderMap, common_name: Option<&CommonName>) -> Caller {
        let shown = headers.get("token").or_else(|| headers.get("authorization"));
        let token = shown.map(|shown| {
            // What is no text is no token.
            let text = shown.to_str().unwrap_or_default();
            Arc::from(text.strip_prefix("Bearer ").unwrap_or(text))
        });
        let behind_gateway = headers.contains_key(GATEWAY);
        let common_name = common_name.filter(|_| !behind_gateway).map(|name| Arc::clone(&name.0));
        Caller { token, common_name }
    }

    /// The caller that the door has put into a request.
    pub(super) fn of<T>(request: &tonic::Request<T>) -> Caller {
        request.extensions().get::<Caller>().cloned().unwrap_or_default()
    }
}

impl Context {
    /// Finds out who asks; nobody is known while authentication is off.
    ///
    /// # Errors
    /// [`AuthError::InvalidAuthToken`].
    pub(super) async fn identify(&self, caller: &Caller) -> Result<Option<Identity>, Error> {
        if !self.state.auth.read().is_enabled() {
            return Ok(None);
        }
        let found = match (&caller.token, &caller.common_name) {
            (Some(token), _) => self.identify_token(token).await.ok_or(AuthError::InvalidAuthToken)?,
            (None, Some(name)) => self.as_of_now(name.to_string()),
            (None, None) => return Ok(None),
        };
        Ok(Some(found))
    }

    async fn identify_token(&self, shown: &str) -> Option<Identity> {
        match &*self.tokens {
            Tokens::None => None,
            Tokens::Jwt(tokens) => tokens.verify(shown),
            Tokens::Simple(tokens) => {
                let index = Simple::index(shown)?;
                if !self.node.await_applied(index, ISSUED_WITHIN).await {
                    return None;
                }
                tokens.user(shown).map(|user| self.as_of_now(user))
            }
        }
    }

    fn as_of_now(&self, name: String) -> Identity {
        Identity { name, auth_revision: self.state.auth.read().revision() }
    }

    /// Finds out who asks, and whether they may.
    pub(super) async fn judge(&self, caller: &Caller, demand: &Demand) -> Result<Option<Identity>, Error> {
        let who = self.identify(caller).await?;
        self.state.auth.read().authorise(who.as_ref(), demand)?;
        Ok(who)
    }

    /// As [`Context::judge`], for reading a range.
    pub(super) async fn judge_read(
        &self,
        caller: &Caller,
        key: &bytes::Bytes,
        range_end: &bytes::Bytes,
    ) -> Result<Option<Identity>, Error> {
        let who = self.identify(caller).await?;
        let auth = self.state.auth.read();
        if auth.is_enabled() {
            auth.authorise(who.as_ref(), &Demand::Keys(vec![Access::read(key, range_end)]))?;
        }
        Ok(who)
    }

    /// As [`Context::judge_read`], for somebody who was known already.
    pub(super) fn judge_again(&self, user: Option<&str>, range: &KeyRange) -> Result<(), Error> {
        let auth = self.state.auth.read();
        let who = user.map(|name| Identity { name: name.to_owned(), auth_revision: auth.revision() });
        let demand = Demand::Keys(vec![Access { right: Right::Read, range: range.clone() }]);
        Ok(auth.authorise(who.as_ref(), &demand)?)
    }

    /// To be asked after a read, before it is shown; see [`crate::auth::Auth::check_unchanged`].
    pub(super) fn check_unchanged(&self, who: Option<&Identity>) -> Result<(), Error> {
        Ok(who.map_or(Ok(()), |_| self.state.auth.read().check_unchanged(who))?)
    }

    /// Who is to be named in a command. One that demands something and that nobody is known for is refused before it is proposed.
    pub(super) async fn identify_for(
        &self,
        caller: &Caller,
        command: &Kind,
    ) -> Result<Option<Identity>, Status> {
        let who = self.identify(caller).await?;
        if who.is_none() && self.state.auth.read().is_enabled() {
            let demand = guard::demand(command, true);
            self.state.auth.read().authorise(None, &demand).map_err(Error::from)?;
        }
        Ok(who)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(headers: &[(&'static str, &str)]) -> Caller {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, value.parse().unwrap());
        }
        Caller::read(&map, Some(&CommonName("cn".into())))
    }

    #[test]
    fn a_token_is_the_first_value_of_the_first_metadata() {
        let token = |headers: &[(&'static str, &str)]| caller(headers).token.as_deref().map(str::to_owned);
        assert_eq!(token(&[]), None);
        assert_eq!(token(&[("token", "a"), ("token", "b")]).as_deref(), Some("a"));
        assert_eq!(token(&[("authorization", "b"), ("token", "a")]).as_deref(), Some("a"));
        assert_eq!(token(&[("authorization", "Bearer b")]).as_deref(), Some("b"));
        assert_eq!(token(&[("token", "Bearer a")]).as_deref(), Some("a"));
        assert_eq!(token(&[("authorization", "bearer b")]).as_deref(), Some("bearer b"));
        assert_eq!(token(&[("token", "")]).as_deref(), Some(""));
    }

    #[test]
    fn a_gateway_in_front_hides_the_certificate() {
        assert_eq!(caller(&[]).common_name.as_deref(), Some("cn"));
        assert_eq!(caller(&[("grpcgateway-accept", "*/*")]).common_name, None);
    }

    #[test]
    fn a_caller_does_not_show_its_token() {
        assert_eq!(
            format!("{:?}", caller(&[("token", "sesame")])),
            "Caller { token: Some(\"shown\"), common_name: Some(\"cn\") }"
        );
    }
}
