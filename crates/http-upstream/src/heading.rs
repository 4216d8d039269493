//! State while the head of a response is awaited.

use std::io;

use gale_http::request::Request;
use gale_runtime::Timer;

use crate::beside_head::Interim;
use crate::receiving::{Message, ResponseReader};

/// State while the head of a response is awaited.
#[derive(Default)]
pub(super) struct Heading {
    /// Read timeout.
    pub silence: Timer,
    /// True if the timeout is to be restarted before the next wait.
    pub is_heard: bool,
    /// The error if sending has failed.
    pub broken: Option<io::Error>,
    pub interim: Interim,
}

/// Logs messages that a server sent besides its response.
pub(super) fn tell_messages(reader: &mut dyn ResponseReader, request: &Request, action: &str) {
    while let Some(Message { level, text }) = reader.take_message() {
        request.log(level, format_args!("{} while {action}", bstr::BStr::new(&text)));
    }
}
