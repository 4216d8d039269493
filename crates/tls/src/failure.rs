//! Why a handshake or a record failed. The words are OpenSSL's where it has some, because administrators search for
//! these.

use std::fmt;
use std::io;

use gale_base::os_error::OsErrorText;
use gale_worker::traffic::{Shaken, Unverified};
use rustls::{AlertDescription, CertificateError, Error, InvalidMessage, PeerIncompatible, PeerMisbehaved};

use super::verify::Fault;

/// Failure of a handshake or of a record.
#[derive(Clone, Debug, PartialEq)]
pub enum TlsFailure {
    /// The peer closed the connection.
    Closed,
    /// The socket failed; the text is the system's.
    Socket(io::ErrorKind, Box<str>),
    /// A message exceeds its limit.
    TooLarge,
    /// The server closed the connection without close_notify, so the data may be truncated.
    CutShort,
    /// The server's certificate failed verification.
    BadCertificate(Fault),
    /// The server's certificate does not match the name.
    WrongName,
    /// The session's keys have encrypted as much as they may.
    Exhausted,
    /// An error of the library.
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

    /// Wraps the failure as a certificate error, which the library returns later.
    pub(super) fn of_certificate(self) -> Error {
        Error::InvalidCertificate(CertificateError::Other(rustls::OtherError(std::sync::Arc::new(self))))
    }

    /// Outcome of the handshake, for metrics.
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

    /// Why the server's certificate was rejected, if that is the failure.
    pub fn unverified(&self) -> Option<Unverified> {
        match self {
            TlsFailure::BadCertificate(fault) => Some(fault.reason()),
            TlsFailure::WrongName => Some(Unverified::WrongName),
            _ => None,
        }
    }

    /// `true` if the client or its network is at fault, so the administrator cannot mend it.
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

/// OpenSSL 3's error number and words.
fn openssl_words(error: &Error) -> Option<(u32, &'static str)> {
    /// Base of the error numbers of OpenSSL's SSL library, to which the reason is added.
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
        // OpenSSL's error on a server without a certificate for the name (`ssl_reject_handshake`).
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
