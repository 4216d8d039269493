//! OCSP: revocation status of certificates, fetched from their issuers' responders.
//!
//! ```text
//!   message    requests and responses
//!   responder  one query over HTTP
//!   stapling   service that fetches the status of the server's own certificates (`ssl_stapling`)
//!   clients    client certificates (`ssl_ocsp`)
//! ```

pub mod clients;
pub mod message;
pub mod responder;
pub mod stapling;
