//! Answers as Go's HTTP library words them, which clients and tests of etcd know.

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE, HeaderValue, X_CONTENT_TYPE_OPTIONS};
use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use tonic::body::Body;

const PLAIN: &str = "text/plain; charset=utf-8";

/// A body of a type.
pub(super) fn with_type(
    status: StatusCode,
    content_type: &'static str,
    body: impl Into<Bytes>,
) -> Response<Body> {
    let mut response = Response::new(Body::new(Full::new(body.into())));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// Text of a type that Go would guess.
pub(super) fn guessed_text(status: StatusCode, body: impl Into<Bytes>) -> Response<Body> {
    with_type(status, PLAIN, body)
}

/// Text whose type a browser must not guess again.
pub(super) fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<Body> {
    let mut response = with_type(status, PLAIN, body);
    response.headers_mut().insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

pub(super) fn not_found() -> Response<Body> {
    text(StatusCode::NOT_FOUND, "404 page not found\n")
}

/// Answers GET, and tells others that only GET is.
pub(super) fn get_only(request: &Request<()>, answer: impl FnOnce() -> Response<Body>) -> Response<Body> {
    if request.method() == Method::GET { answer() } else { method_not_allowed() }
}

pub(super) fn method_not_allowed() -> Response<Body> {
    let mut response = text(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed\n");
    response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET"));
    response
}

/// Values of a query parameter, decoded.
pub(super) fn query_values(request: &Request<()>, name: &str) -> Vec<String> {
    let query = request.uri().query().unwrap_or_default();
    let pairs = query.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    pairs.filter(|(found, _)| decoded(found) == name).map(|(_, value)| decoded(value)).collect()
}

/// Decodes `+` and `%XX`; what is malformed stays as it is.
fn decoded(text: &str) -> String {
    let hex = |at: usize| text.get(at..at + 2).and_then(|digits| u8::from_str_radix(digits, 16).ok());
    let mut bytes = Vec::with_capacity(text.len());
    let mut at = 0;
    while let Some(byte) = text.as_bytes().get(at) {
        at += 1;
        bytes.push(match (byte, hex(at)) {
            (b'%', Some(value)) => {
                at += 2;
                value
            }
            (b'+', _) => b' ',
            _ => *byte,
        });
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_decoded() {
        let request = Request::get("/health?exclude=NOSPACE&exclude=&ex%63lude=A%2bB+C&verbose&x=%zz")
            .body(())
            .unwrap();
        assert_eq!(query_values(&request, "exclude"), ["NOSPACE", "", "A+B C"]);
        assert_eq!(query_values(&request, "verbose"), [""]);
        assert_eq!(query_values(&request, "x"), ["%zz"]);
        assert!(query_values(&request, "y").is_empty());
    }
}
