//! HTTP/1.1 on the client port: health, version, metrics.

mod http;

pub use http::Gateway;
