//! Why a handshake or a record failed, in the words in which OpenSSL says it, as far as it has some: these are what
//! people search for.

use std::fmt;
use std::io;

use gale_base::os_error::OsErrorText;
use rustls::{AlertDescription, CertificateError, Error, InvalidMessage, PeerIncompatible, PeerMisbehaved};

use super::verify::Fault;
use crate::traffic::{Shaken, Unverified};

/// See the file's head.
#[derive(Clone, Debug, PartialEq)]
pub enum TlsFailure {
    /// The peer closed the connection.
    Closed,
    /// The socket failed, as this says.
    Socket(io::ErrorKind, Box<str>),
    /// A message is too large.
    TooLarge,
    /// The server has closed the connection and did not say whether it has sent everything.
    CutShort,
    /// The server's certificate is not good, as this says.
    BadCertificate(Fault),
    /// The server's certificate is for other names.
    WrongName,
    /// A session has encrypted as much as its keys may.
    Exhausted,
    /// What the library says.
    Library(Box<Error>),
}

impl TlsFailure {
    pub(super) fn of(error: Error) -> TlsFailure {
        if let Error::InvalidCertificate(CertificateError::Other(other)) = &error
            && let Some(failure) = other.0.downcast_ref::<TlsFailure>()
        {
            return failure.clone();
        }
        TlsFailure::Library(Box::new(error))
    }

    pub(super) fn of_socket(error: io::Error) -> TlsFailure {
        TlsFailure::Socket(error.kind(), OsErrorText(&error).to_string().into())
    }

    pub(super) fn unexpected() -> TlsFailure {
        TlsFailure::of(Error::General("an unexpected state".to_owned()))
    }

    /// As the error of a certificate, for the library to return it later.
    pub(super) fn of_certificate(self) -> Error {
        Error::InvalidCertificate(CertificateError::Other(rustls::OtherError(std::sync::Arc::new(self))))
    }

    /// What became of the handshake, as figures have it.
    pub fn outcome(&self) -> Shaken {
        let TlsFailure::Library(error) = self else { return Shaken::Failed };
        match &**error {
            Error::PeerIncompatible(PeerIncompatible::NoCipherSuitesInCommon) => Shaken::NoCommonCipher,
            Error::PeerIncompatible(
                PeerIncompatible::Tls12NotOffered
                | PeerIncompatible::Tls12NotOfferedOrEnabled
                | PeerIncompatible::SupportedVersionsExtensionRequired
                | PeerIncompatible::ServerDoesNotSupportTls12Or13
                | PeerIncompatible::ServerTlsVersionIsDisabledByOurConfig,
            )
            | Error::AlertReceived(AlertDescription::ProtocolVersion) => Shaken::NoCommonProtocol,
            Error::AlertReceived(
                AlertDescription::BadCertificate
                | AlertDescription::UnsupportedCertificate
                | AlertDescription::CertificateRevoked
                | AlertDescription::CertificateExpired
                | AlertDescription::CertificateUnknown
                | AlertDescription::UnknownCA,
            ) => Shaken::CertificateRejected,
            _ => Shaken::Failed,
        }
    }

    /// Why the server's certificate is not good, if that is the reason.
    pub fn unverified(&self) -> Option<Unverified> {
        match self {
            TlsFailure::BadCertificate(fault) => Some(fault.reason()),
            TlsFailure::WrongName => Some(Unverified::WrongName),
            _ => None,
        }
    }

    /// Whether the client is to blame, or its network: nothing that the administrator could do anything about.
    pub fn is_usual(&self) -> bool {
        match self {
            TlsFailure::Exhausted | TlsFailure::Socket(io::ErrorKind::OutOfMemory, _) => false,
            TlsFailure::Library(error) => {
                !matches!(**error, Error::General(_) | Error::FailedToGetCurrentTime | Error::FailedToGetRandomBytes)
            }
            _ => true,
        }
    }
}

impl fmt::Display for TlsFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TlsFailure::Closed => f.write_str("peer closed connection in SSL handshake"),
            TlsFailure::Socket(_, text) => write!(f, "SSL_do_handshake() failed {text}"),
            TlsFailure::TooLarge => {
                f.write_str("SSL_do_handshake() failed (SSL: error:0A000098:SSL routines::excessive message size)")
            }
            TlsFailure::CutShort => f.write_str("peer closed connection without close_notify"),
            TlsFailure::BadCertificate(fault) => {
                write!(f, "upstream SSL certificate verify error: ({}:{})", fault.number(), fault.words())
            }
            TlsFailure::WrongName => f.write_str("upstream SSL certificate does not match"),
            TlsFailure::Exhausted => f.write_str("the session's keys have reached their usage limit"),
            TlsFailure::Library(error) => {
                f.write_str("SSL_do_handshake() failed (SSL: ")?;
                match (openssl_words(error), &**error) {
                    (Some((code, words)), Error::AlertReceived(alert)) => {
                        write!(f, "error:{code:08X}:SSL routines::{words}:SSL alert number {}", u8::from(*alert))?;
                    }
                    (Some((code, words)), _) => write!(f, "error:{code:08X}:SSL routines::{words}")?,
                    (None, error) => write!(f, "{error}")?,
                }
                f.write_str(")")
            }
        }
    }
}

impl std::error::Error for TlsFailure {}

impl From<TlsFailure> for io::Error {
    fn from(failure: TlsFailure) -> io::Error {
        let kind = match &failure {
            TlsFailure::Closed | TlsFailure::CutShort => io::ErrorKind::UnexpectedEof,
            TlsFailure::Socket(kind, _) => *kind,
            TlsFailure::TooLarge
            | TlsFailure::BadCertificate(..)
            | TlsFailure::WrongName
            | TlsFailure::Exhausted
            | TlsFailure::Library(_) => io::ErrorKind::InvalidData,
        };
        io::Error::new(kind, failure)
    }
}

/// The number and the words of OpenSSL 3.
fn openssl_words(error: &Error) -> Option<(u32, &'static str)> {
    /// Of errors of the library for SSL, to which the reason is added.
    const SSL: u32 = 0x0A00_0000;
    let (reason, words) = match error {
        Error::AlertReceived(alert) => (1000 + u32::from(u8::from(*alert)), alert_words(*alert)?),
        Error::PeerIncompatible(error) => match error {
            PeerIncompatible::NoCipherSuitesInCommon => (193, "no shared cipher"),
            PeerIncompatible::Tls12NotOffered
            | PeerIncompatible::Tls12NotOfferedOrEnabled
            | PeerIncompatible::SupportedVersionsExtensionRequired => (258, "unsupported protocol"),
            PeerIncompatible::NoKxGroupsInCommon => (101, "no suitable key share"),
            PeerIncompatible::NoSignatureSchemesInCommon => (118, "no suitable signature algorithm"),
            _ => return None,
        },
        Error::NoApplicationProtocol => (235, "no application protocol"),
        Error::DecryptError => (281, "decryption failed or bad record mac"),
        Error::PeerSentOversizedRecord => (198, "packet length too long"),
        Error::InvalidMessage(error) => match error {
            InvalidMessage::InvalidContentType | InvalidMessage::UnknownProtocolVersion => {
                (267, "wrong version number")
            }
            InvalidMessage::MessageTooLarge => (198, "packet length too long"),
            InvalidMessage::MessageTooShort => (160, "length too short"),
            _ => (159, "length mismatch"),
        },
        Error::InappropriateMessage { .. } | Error::InappropriateHandshakeMessage { .. } => (244, "unexpected message"),
        Error::PeerMisbehaved(PeerMisbehaved::TooManyRenegotiationRequests) => (339, "no renegotiation"),
        // What a server without a certificate for the name says (`ssl_reject_handshake`).
        Error::General(text) if text == "no server certificate chain resolved" => (234, "callback failed"),
        _ => return None,
    };
    Some((SSL | reason, words))
}

fn alert_words(alert: AlertDescription) -> Option<&'static str> {
    Some(match alert {
        AlertDescription::CloseNotify => "close notify",
        AlertDescription::UnexpectedMessage => "ssl/tls alert unexpected message",
        AlertDescription::BadRecordMac => "ssl/tls alert bad record mac",
        AlertDescription::HandshakeFailure => "ssl/tls alert handshake failure",
        AlertDescription::BadCertificate => "ssl/tls alert bad certificate",
        AlertDescription::UnsupportedCertificate => "ssl/tls alert unsupported certificate",
        AlertDescription::CertificateRevoked => "ssl/tls alert certificate revoked",
        AlertDescription::CertificateExpired => "ssl/tls alert certificate expired",
        AlertDescription::CertificateUnknown => "ssl/tls alert certificate unknown",
        AlertDescription::IllegalParameter => "ssl/tls alert illegal parameter",
        AlertDescription::UnknownCA => "tlsv1 alert unknown ca",
        AlertDescription::AccessDenied => "tlsv1 alert access denied",
        AlertDescription::DecodeError => "tlsv1 alert decode error",
        AlertDescription::DecryptError => "tlsv1 alert decrypt error",
        AlertDescription::ProtocolVersion => "tlsv1 alert protocol version",
        AlertDescription::InsufficientSecurity => "tlsv1 alert insufficient security",
        AlertDescription::InternalError => "tlsv1 alert internal error",
        AlertDescription::InappropriateFallback => "tlsv1 alert inappropriate fallback",
        AlertDescription::UserCanceled => "tlsv1 alert user cancelled",
        AlertDescription::NoRenegotiation => "tlsv1 alert no renegotiation",
        AlertDescription::UnrecognisedName => "tlsv1 unrecognized name",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_openssl_s_where_it_has_some() {
        let text = |error| TlsFailure::of(error).to_string();
        assert_eq!(
            text(Error::AlertReceived(AlertDescription::CertificateUnknown)),
            "SSL_do_handshake() failed (SSL: error:0A000416:SSL routines::ssl/tls alert certificate unknown:SSL alert \
             number 46)"
        );
        assert_eq!(
            text(Error::PeerIncompatible(PeerIncompatible::NoCipherSuitesInCommon)),
            "SSL_do_handshake() failed (SSL: error:0A0000C1:SSL routines::no shared cipher)"
        );
        assert!(TlsFailure::of(Error::DecryptError).is_usual() && !TlsFailure::Exhausted.is_usual());
    }
}
