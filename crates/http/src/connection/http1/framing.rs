//! The framing of HTTP/1 responses: the head, and the end of the body. (RFC 9112 §4, §6 and §7)
//!
//! It makes the bytes before and behind the items of a body, and sends nothing.

use std::borrow::Cow;

use gale_protocol::http1::response;
use gale_protocol::response::ResponseField;
use gale_runtime::Bytes;

use super::send::Conduct;
use crate::connection::worker::HttpConnections;
use crate::request::Request;
use crate::request::configuration::settings::{CoreSettings, ServerTokens};
use crate::request::exchange::BodyLength;
use crate::request::response::ResponseHead;
use crate::request::server_field::server_field;

/// The `Server` field with `server_tokens off`.
const SERVER_LINE: &[u8] = b"Server: gale\r\n";

/// The `Server` field with `server_tokens on`.
const SERVER_LINE_WITH_VERSION: &[u8] = concat!("Server: gale/", env!("CARGO_PKG_VERSION"), "\r\n").as_bytes();

/// Way in which the client learns of the body's end.
#[derive(Debug, Default)]
pub(super) enum Framing {
    /// There is no body, whatever is pushed.
    #[default]
    NoBody,
    /// This many bytes are still to be pushed.
    Length(u64),
    Chunked {
        /// The lines of the fields behind it.
        trailers: Vec<u8>,
    },
    UntilClose,
    Tunnel {
        /// Our direction has ended, and the client was told.
        is_shut_down: bool,
    },
}

/// Framing of one item of the body.
pub(super) enum Framed {
    /// The item is not sent.
    Dropped,
    /// The item is sent as it is.
    Plain,
    /// The item is sent between this and [`response::CHUNK_END`].
    Chunk(response::ChunkHeader),
    /// It is more than the head announced: the client would take it for the next response.
    TooLong,
}

/// Bytes behind the last item.
pub(super) enum End {
    Nothing,
    LastChunk,
    /// The last chunk with the fields behind it.
    Trailers(Vec<u8>),
    /// Fewer bytes came than announced: the client must see that some are missing.
    TooShort,
}

impl Framing {
    pub(super) fn of(length: BodyLength, may_be_chunked: bool) -> Framing {
        match length {
            BodyLength::NoBody => Framing::NoBody,
            BodyLength::Known(length) => Framing::Length(length),
            BodyLength::UntilEnd if may_be_chunked => Framing::Chunked { trailers: Vec::new() },
            BodyLength::UntilEnd => Framing::UntilClose,
        }
    }

    pub(super) fn is_tunnel(&self) -> bool {
        matches!(self, Framing::Tunnel { .. })
    }

    /// Frames an item of so many bytes.
    pub(super) fn frame(&mut self, length: u64) -> Framed {
        match self {
            Framing::NoBody => Framed::Dropped,
            Framing::Length(left) if length > *left => Framed::TooLong,
            Framing::Length(left) => {
                *left -= length;
                if length > 0 { Framed::Plain } else { Framed::Dropped }
            }
            _ if length == 0 => Framed::Dropped,
            Framing::Chunked { .. } => Framed::Chunk(response::ChunkHeader::new(length)),
            Framing::UntilClose | Framing::Tunnel { .. } => Framed::Plain,
        }
    }

    /// Takes fields that stand behind the body, where they can: behind chunks.
    pub(super) fn add_trailers(&mut self, fields: &[(Bytes, Bytes)]) {
        if let Framing::Chunked { trailers } = self {
            for (name, value) in fields {
                response::write_header(trailers, name, value);
            }
        }
    }

    /// Nothing more comes.
    pub(super) fn end(&mut self) -> End {
        match self {
            Framing::Chunked { trailers } if trailers.is_empty() => End::LastChunk,
            Framing::Chunked { trailers } => End::Trailers([b"0\r\n", &trailers[..], b"\r\n"].concat()),
            Framing::Length(1..) => End::TooShort,
            Framing::NoBody | Framing::Length(0) | Framing::UntilClose | Framing::Tunnel { .. } => End::Nothing,
        }
    }
}

/// Writes the head, its fields in nginx's order. Returns `true` if line ends in values became spaces.
pub(super) fn write_head(
    head: &ResponseHead,
    framing: &Framing,
    keeps_alive: bool,
    conduct: &Conduct<'_>,
    connections: &HttpConnections,
    out: &mut Vec<u8>,
) -> bool {
    let mut is_changed = false;
    match head.reason() {
        None => response::write_status_line(out, head.status),
        Some(phrase) => response::write_status_line_with(out, head.status, phrase),
    }
    if !head.has(ResponseField::Server) && !head.omits_server {
        out.extend_from_slice(conduct.server_line);
    }
    if !head.has(ResponseField::Date) {
        connections.append_date_line(out);
    }
    if !head.content_type.is_empty() {
        is_changed |= response::write_header(out, b"Content-Type", &head.content_type);
    }
    if let Some(length) = head.content_length {
        response::write_header_number(out, b"Content-Length", length);
    }
    if let Some(time) = head.last_modified_text() {
        response::write_own_header(out, b"Last-Modified", &time);
    }
    if !head.location.is_empty() {
        is_changed |= response::write_header(out, b"Location", &head.location);
    }
    if matches!(framing, Framing::Chunked { .. }) {
        out.extend_from_slice(b"Transfer-Encoding: chunked\r\n");
    }
    if framing.is_tunnel() {
        out.extend_from_slice(tunnel_line(head.status));
    } else if keeps_alive {
        out.extend_from_slice(b"Connection: keep-alive\r\n");
        if let Some(time) = conduct.keep_alive_advertised {
            let value = format!("timeout={}", time.as_secs());
            response::write_header(out, b"Keep-Alive", value.as_bytes());
        }
    } else {
        out.extend_from_slice(b"Connection: close\r\n");
    }
    if !head.etag.is_empty() {
        is_changed |= response::write_header(out, b"ETag", &head.etag);
    }
    if head.allows_ranges {
        out.extend_from_slice(b"Accept-Ranges: bytes\r\n");
    }
    for field in head.fields.iter() {
        is_changed |= response::write_header(out, &field.name, &field.value);
    }
    out.extend_from_slice(b"\r\n");
    is_changed
}

/// The `Server` field with its line end; empty when there is none.
#[inline]
pub(super) fn server_line<'c>(request: &Request, core: &'c CoreSettings) -> Cow<'c, [u8]> {
    match core.server_tokens.get() {
        ServerTokens::On | ServerTokens::Build => Cow::Borrowed(SERVER_LINE_WITH_VERSION),
        ServerTokens::Off => Cow::Borrowed(SERVER_LINE),
        ServerTokens::Text(_) => {
            let value = server_field(request, core);
            let mut line = Vec::new();
            if !value.is_empty() {
                response::write_header(&mut line, b"Server", &value);
            }
            Cow::Owned(line)
        }
    }
}

/// The `Connection` field of the head that opens a tunnel. Only a 101 changes the protocol (RFC 9110, section 7.8); a
/// 2xx to CONNECT has no such field (section 9.3.6).
fn tunnel_line(status: u16) -> &'static [u8] {
    if status == 101 { b"Connection: upgrade\r\n" } else { b"" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_101_says_that_the_connection_is_upgraded() {
        assert_eq!(tunnel_line(101), b"Connection: upgrade\r\n");
        assert_eq!(tunnel_line(200), b"");
    }

    #[test]
    fn more_or_fewer_bytes_than_announced_are_noticed() {
        let mut framing = Framing::of(BodyLength::Known(10), true);
        assert!(matches!(framing.frame(4), Framed::Plain));
        assert!(matches!(framing.frame(0), Framed::Dropped));
        assert!(matches!(framing.frame(7), Framed::TooLong));
        assert!(matches!(framing.end(), End::TooShort));
        assert!(matches!(framing.frame(6), Framed::Plain));
        assert!(matches!(framing.end(), End::Nothing));
    }

    #[test]
    fn trailers_stand_behind_chunks_alone() {
        let fields = [("Digest".into(), "one".into())];
        let mut framing = Framing::of(BodyLength::UntilEnd, true);
        assert!(matches!(framing.frame(300), Framed::Chunk(header) if header.as_bytes() == b"12c\r\n"));
        assert!(matches!(framing.end(), End::LastChunk));
        framing.add_trailers(&fields);
        assert!(matches!(framing.end(), End::Trailers(text) if text == b"0\r\nDigest: one\r\n\r\n"));
        for mut framing in [Framing::of(BodyLength::UntilEnd, false), Framing::of(BodyLength::Known(0), true)] {
            framing.add_trailers(&fields);
            assert!(matches!(framing.end(), End::Nothing));
        }
    }
}
