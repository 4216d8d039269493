//! Failures of a server before the head of its response.

use std::io;

use gale_base::os_error::OsErrorText;
use gale_tls::TlsFailure;

use crate::receiving::Malformed;
use crate::sending::SendError;

/// Current action, for messages.
pub(super) const READING: &str = "reading response header from upstream";

/// Reason for which there is no head.
pub(super) enum End {
    /// The connection ended before the head.
    Closed,
    /// Sending failed.
    Sending(io::Error),
    /// Receiving failed.
    Receiving(io::Error),
    /// Read timeout.
    Silent,
    /// The head is invalid.
    Malformed(Malformed),
    /// The request could not be sent.
    Send(SendError),
    /// The server has not processed the request.
    Unprocessed,
}

impl End {
    /// True if an idle connection that the server has closed may fail in this way.
    pub fn is_of_connection(&self) -> bool {
        match self {
            End::Closed | End::Sending(_) => true,
            End::Receiving(error) => error.kind() != io::ErrorKind::OutOfMemory,
            End::Silent | End::Malformed(_) | End::Send(_) | End::Unprocessed => false,
        }
    }
}

/// Describes a failed receive in nginx's words.
pub(super) fn receive_failure(error: &io::Error) -> String {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<TlsFailure>()) {
        Some(TlsFailure::CutShort) => "upstream prematurely closed connection without close_notify".to_owned(),
        Some(failure) => failure.to_string().replacen("SSL_do_handshake()", "SSL_read()", 1),
        None => format!("recv() failed {}", OsErrorText(error)),
    }
}
