//! Challenges, by which an issuer checks that this server controls a name: one type for each kind.
//!
//! A kind that needs something outside of this process, such as a DNS record, may wait for it in `present`.

use std::any::Any;
use std::net::IpAddr;
use std::sync::Arc;

use gale_http::request::phases::LocalBoxFuture;
use gale_runtime::default_pool;
use gale_tls::challenges::{self, Answer, AnswerDirectory, AskedOver};

/// A challenge of an issuer for one name.
pub(super) struct Question {
    /// The name or address to prove control of.
    pub name: String,
    /// The challenge's token (RFC 8555, section 8.3).
    pub token: String,
    /// The token with the hash of the account's key (section 8.1).
    pub key_authorization: String,
}

/// Keeps the response in place for the issuer until it is dropped.
pub(super) type Guard = Box<dyn Any>;

/// A kind of challenge.
pub(super) trait Challenge: Send + Sync {
    /// Returns its name in the protocol.
    fn kind(&self) -> &'static str;

    /// Returns `true` if it can prove control of names such as `*.example.com`.
    fn covers_wildcards(&self) -> bool {
        false
    }

    /// Puts the response in place for the issuer.
    fn present(
        &self,
        question: Question,
        directory: Option<Arc<AnswerDirectory>>,
    ) -> LocalBoxFuture<'static, Result<Guard, String>>;
}

/// `http-01`: a file (RFC 8555, section 8.3).
pub(super) struct Http01;

/// `tls-alpn-01`: a certificate in a handshake (RFC 8737).
pub(super) struct TlsAlpn01;

impl Challenge for Http01 {
    fn kind(&self) -> &'static str {
        "http-01"
    }

    fn present(
        &self,
        question: Question,
        directory: Option<Arc<AnswerDirectory>>,
    ) -> LocalBoxFuture<'static, Result<Guard, String>> {
        let Question { token, key_authorization, .. } = question;
        present(Answer { over: AskedOver::Http, key: token, text: key_authorization }, directory)
    }
}

impl Challenge for TlsAlpn01 {
    fn kind(&self) -> &'static str {
        "tls-alpn-01"
    }

    fn present(
        &self,
        question: Question,
        directory: Option<Arc<AnswerDirectory>>,
    ) -> LocalBoxFuture<'static, Result<Guard, String>> {
        let Question { name, key_authorization, .. } = question;
        let name = name.parse::<IpAddr>().map_or(name, challenges::name_of_address);
        present(Answer { over: AskedOver::Tls, key: name, text: key_authorization }, directory)
    }
}

fn present(answer: Answer, directory: Option<Arc<AnswerDirectory>>) -> LocalBoxFuture<'static, Result<Guard, String>> {
    Box::pin(async move {
        let presented = default_pool().run(move || challenges::present(&answer, directory.as_deref())).await;
        let presented = presented.map_err(|error| error.to_string())??;
        Ok(Box::new(presented) as Guard)
    })
}
