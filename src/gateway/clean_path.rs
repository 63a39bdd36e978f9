//! Paths with doubled slashes or dots get a redirect to their clean form, as from the router of Go's HTTP library.

use std::fmt::Write as _;

use http::header::{CONNECTION, CONTENT_TYPE, HeaderValue, LOCATION};
use http::{Method, Request, Response, StatusCode};
use tonic::body::Body;

use super::answer;

/// The answer to a request whose path is not clean, or `None`.
pub(super) fn check(request: &Request<()>) -> Option<Response<Body>> {
    let path = request.uri().path();
    let clean = cleaned(path);
    (clean != path && request.method() != Method::CONNECT).then(|| redirect(request, &clean))
}

/// True if a `%` in the path is not followed by two hexadecimal digits.
pub(super) fn is_malformed(path: &str) -> bool {
    path.split('%')
        .skip(1)
        .any(|rest| !rest.as_bytes().iter().take(2).all(u8::is_ascii_hexdigit) || rest.len() < 2)
}

/// What a request with a malformed path gets, before anything else is looked at.
pub(super) fn bad_request() -> Response<Body> {
    let mut response = answer::guessed_text(StatusCode::BAD_REQUEST, "400 Bad Request");
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    response
}

/// Sends the client to another path, with its query.
pub(super) fn redirect(request: &Request<()>, path: &str) -> Response<Body> {
    let mut location = escaped(path);
    if let Some(query) = request.uri().query().filter(|query| !query.is_empty()) {
        location.push('?');
        location.push_str(query);
    }
    let body = match *request.method() {
        Method::GET => format!("<a href=\"{}\">Temporary Redirect</a>.\n\n", in_html(&location)),
        _ => String::new(),
    };
    let mut response = answer::with_type(StatusCode::TEMPORARY_REDIRECT, "text/html; charset=utf-8", body);
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        response.headers_mut().remove(CONTENT_TYPE);
    }
    // Escaped, and what a query can hold came in a request line.
    if let Ok(location) = HeaderValue::from_str(&location) {
        response.headers_mut().insert(LOCATION, location);
    }
    response
}

/// The path without doubled slashes and dots; a slash at the end stays.
fn cleaned(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    let end = if path.ends_with('/') && !parts.is_empty() { "/" } else { "" };
    format!("/{}{end}", parts.join("/"))
}

/// Escapes a path that is escaped already once more, as Go does here: only what needs no escape survives.
fn escaped(path: &str) -> String {
    let mut out = String::with_capacity(path.len());
    for byte in path.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~$&+,/:;=@".contains(&byte) {
            out.push(char::from(byte));
        } else {
            // Writing to a string does not fail.
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

fn in_html(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            other => out.push(other),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_cleaned() {
        for (path, clean) in [
            ("/", "/"),
            ("//", "/"),
            ("/..", "/"),
            ("/../..//", "/"),
            ("//version", "/version"),
            ("/version//", "/version/"),
            ("/version/.", "/version"),
            ("/a/../version", "/version"),
            ("/a/./b/../c", "/a/c"),
            ("/...", "/..."),
            ("/%2e%2e/version", "/%2e%2e/version"),
        ] {
            assert_eq!(cleaned(path), clean, "{path}");
        }
    }

    #[test]
    fn a_redirect_says_where_to() {
        let check = |path: &str| check(&Request::get(path).body(()).unwrap());
        assert!(check("/version?//").is_none());
        let response = check("//b%20c!?x=&y").unwrap();
        assert_eq!(response.status(), StatusCode::TEMPORARY_REDIRECT);
        assert_eq!(response.headers()[LOCATION], "/b%2520c%21?x=&y");
    }

    #[test]
    fn escapes_are_checked() {
        assert!(["/%", "/%z", "/%zz", "/a%1/b", "/%41%4"].into_iter().all(is_malformed));
        assert!(!["/", "/%41", "/%fF/%00"].into_iter().any(is_malformed));
    }
}
