//! OCSP: whether certificates were revoked, asked of their issuers' responders.
//!
//! ```text
//! message    requests and responses
//! responder  asks one, over HTTP
//! stapling   the service that has clients told of the server's own certificates (`ssl_stapling`)
//! clients    certificates of clients (`ssl_ocsp`)
//! ```

pub mod clients;
pub mod message;
pub mod responder;
pub mod stapling;
