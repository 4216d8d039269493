//! HTTP/2: RFC 9113, with HPACK (RFC 7541).

pub mod hpack;
