//! Decoder for the chunked transfer coding (RFC 9112 §7.1) of requests and upstream responses.
//!
//! The decoder returns ranges of its input and copies nothing but trailer fields. Line ends must be CRLF, since lenient
//! parsing of them enables request smuggling. Invariant: the overhead around the data is bounded, whatever the number
//! of chunks.

use std::mem;
use std::ops::Range;

use super::field_line::is_token_byte;
use crate::{Offence, Range32};

/// Limits on the overhead of one body.
#[derive(Clone, Copy, Debug)]
pub struct ChunkLimits {
    /// Maximum size of all chunk extensions together in bytes, spaces included.
    pub extensions_max: u32,
    /// Maximum size of the trailer section in bytes, line ends included.
    pub trailers_max: u32,
}

impl Default for ChunkLimits {
    /// 16 KiB of extensions, which no known client uses, and trailers up to the size of a large header buffer of nginx.
    fn default() -> Self {
        Self { extensions_max: 16 * 1024, trailers_max: 8 * 1024 }
    }
}

/// One step of decoding.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Decoded {
    /// Number of input bytes processed, including `data`.
    pub consumed: usize,
    /// Body data as a range of the input; never empty.
    pub data: Option<Range<usize>>,
    /// `true` if the body is complete; the bytes after `consumed` belong to the next request.
    pub finished: bool,
}

/// The trailer fields of one body, in their original order and spelling.
///
/// They arrive after the head has been acted on, so they are never merged into it. Fields for framing, routing or
/// authentication have no meaning here (RFC 9110 §6.5.1).
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Trailers {
    /// Text that contains the fields: at most [`ChunkLimits::trailers_max`] bytes.
    pub text: Vec<u8>,
    /// Name and value of each field, the value without surrounding white space. A field takes at least four bytes of
    /// the text.
    pub fields: Vec<(Range32, Range32)>,
}

/// Incremental decoder of one chunked body.
#[derive(Clone, Debug)]
pub struct ChunkedDecoder {
    state: State,
    /// Number of digits read of the current size.
    digits: u8,
    /// Remaining data bytes of the current chunk.
    remaining: u64,
    extensions_left: u32,
    trailers_left: u32,
    /// The lines of the trailer section, without the final empty line.
    trailers: Vec<u8>,
    /// Refuse spaces after a size, and empty extensions.
    is_strict: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Size,
    /// Spaces after the size; an extension or the line end follows.
    SpaceAfterSize,
    /// After a semicolon in a request: the name of an extension must follow.
    ExtensionStart,
    Extension,
    SizeLf,
    Data,
    DataCr,
    DataLf,
    TrailerStart,
    TrailerName,
    TrailerValue,
    TrailerLf,
    EndLf,
    Finished,
}

/// A size with more digits is refused even if the additional ones are zeros.
const SIZE_DIGITS_MAX: u8 = 16;

impl Default for ChunkedDecoder {
    fn default() -> Self {
        Self::new(ChunkLimits::default())
    }
}

impl ChunkedDecoder {
    /// Creates a decoder at the beginning of a body.
    pub fn new(limits: ChunkLimits) -> Self {
        Self {
            state: State::Size,
            digits: 0,
            remaining: 0,
            extensions_left: limits.extensions_max,
            trailers_left: limits.trailers_max,
            trailers: Vec::new(),
            is_strict: false,
        }
    }

    /// Creates a decoder for a request body. It refuses spaces after a size (`5 ;a`) and extensions without a name
    /// (`5;`): other servers and proxies disagree about them, and no client sends them.
    pub fn of_request() -> Self {
        Self { is_strict: true, ..Self::default() }
    }

    /// Returns `true` if the whole body, trailers included, has been decoded.
    pub fn is_finished(&self) -> bool {
        self.state == State::Finished
    }

    /// Number of data bytes of the current chunk that have not been returned yet.
    pub fn chunk_remaining(&self) -> u64 {
        if self.state == State::Data { self.remaining } else { 0 }
    }

    /// Decodes up to the next piece of data, the end of the body, or the end of the input, whichever comes first.
    ///
    /// Call again with the input after `consumed` until none is left. Trailer fields are checked and kept. After an
    /// offence the decoder must not be used any more.
    pub fn decode(&mut self, input: &[u8]) -> Result<Decoded, Offence> {
        let mut at = 0;
        while let Some(&byte) = input.get(at) {
            match self.state {
                State::Data => {
                    let length = usize::try_from(self.remaining).unwrap_or(usize::MAX).min(input.len() - at);
                    self.remaining -= length as u64;
                    if self.remaining == 0 {
                        self.state = State::DataCr;
                    }
                    return Ok(Decoded { consumed: at + length, data: Some(at..at + length), finished: false });
                }
                State::Finished => break,
                _ => self.handle_byte(byte)?,
            }
            at += 1;
        }
        Ok(Decoded { consumed: at, data: None, finished: self.is_finished() })
    }

    /// Returns the trailer fields of a finished body, or none if they have been taken before.
    pub fn take_trailers(&mut self) -> Trailers {
        debug_assert!(self.is_finished(), "the body is not complete");
        let text = mem::take(&mut self.trailers);
        let mut fields = Vec::new();
        let mut start = 0;
        // Each line has a name, a colon and CRLF: this was checked when it arrived.
        for line in text.split_inclusive(|&byte| byte == b'\n') {
            let colon = line.iter().position(|&byte| byte == b':').unwrap_or(line.len());
            let value = line.get(colon + 1..).unwrap_or_default();
            let value_start = start + colon + 1 + value.len() - value.trim_ascii_start().len();
            let value = value.trim_ascii();
            let name = Range32::new(start, start + colon);
            fields.push((name, Range32::new(value_start, value_start + value.len())));
            start += line.len();
        }
        Trailers { text, fields }
    }

    /// Processes one byte outside of the data.
    fn handle_byte(&mut self, byte: u8) -> Result<(), Offence> {
        match (self.state, byte) {
            (State::Size, b'\r') if self.digits > 0 => self.state = State::SizeLf,
            (State::Size, b';') if self.digits > 0 && self.is_strict => self.enter_extension(State::ExtensionStart)?,
            (State::Size, b';') if self.digits > 0 => self.enter_extension(State::Extension)?,
            (State::Size, b' ' | b'\t') if self.digits > 0 && !self.is_strict => {
                self.enter_extension(State::SpaceAfterSize)?
            }
            (State::Size, _) => self.take_digit(byte)?,

            (State::SpaceAfterSize, b' ' | b'\t') => self.enter_extension(State::SpaceAfterSize)?,
            (State::SpaceAfterSize, b';') => self.enter_extension(State::Extension)?,
            (State::SpaceAfterSize | State::Extension, b'\r') => self.state = State::SizeLf,
            (State::Extension, byte) if is_text(byte) => self.enter_extension(State::Extension)?,

            (State::ExtensionStart, b' ' | b'\t') => self.enter_extension(State::ExtensionStart)?,
            (State::ExtensionStart, byte) if is_token_byte(byte) => self.enter_extension(State::Extension)?,

            (State::SizeLf, b'\n') => {
                self.digits = 0;
                self.state = if self.remaining == 0 { State::TrailerStart } else { State::Data };
            }
            (State::DataCr, b'\r') => self.state = State::DataLf,
            (State::DataLf, b'\n') => self.state = State::Size,

            (State::TrailerStart, b'\r') => self.state = State::EndLf,
            (State::TrailerStart | State::TrailerName, byte) if is_token_byte(byte) => {
                self.enter_trailer(byte, State::TrailerName)?
            }
            (State::TrailerName, b':') => self.enter_trailer(byte, State::TrailerValue)?,
            (State::TrailerValue, b'\r') => self.enter_trailer(byte, State::TrailerLf)?,
            (State::TrailerValue, byte) if is_text(byte) => self.enter_trailer(byte, State::TrailerValue)?,
            (State::TrailerLf, b'\n') => self.enter_trailer(byte, State::TrailerStart)?,
            (State::TrailerStart | State::TrailerName | State::TrailerValue | State::TrailerLf, _) => {
                return Err(Offence::InvalidTrailer);
            }
            (State::EndLf, b'\n') => self.state = State::Finished,
            _ => return Err(Offence::InvalidChunk),
        }
        Ok(())
    }

    fn take_digit(&mut self, byte: u8) -> Result<(), Offence> {
        let digit = crate::uri::HEX_VALUE[byte as usize];
        // Half of the range is enough for any file offset and prevents overflow in sums of sizes.
        if digit > 15 || self.digits == SIZE_DIGITS_MAX || self.remaining > (i64::MAX as u64) >> 4 {
            return Err(Offence::InvalidChunk);
        }
        self.digits += 1;
        self.remaining = self.remaining << 4 | u64::from(digit);
        Ok(())
    }

    fn enter_extension(&mut self, state: State) -> Result<(), Offence> {
        self.extensions_left = self.extensions_left.checked_sub(1).ok_or(Offence::ChunkExtensionsTooLarge)?;
        self.state = state;
        Ok(())
    }

    fn enter_trailer(&mut self, byte: u8, state: State) -> Result<(), Offence> {
        self.trailers_left = self.trailers_left.checked_sub(1).ok_or(Offence::TrailersTooLarge)?;
        self.trailers.push(byte);
        self.state = state;
        Ok(())
    }
}

/// Returns `true` for bytes other than control characters, and for tab (RFC 9110 §5.5).
fn is_text(byte: u8) -> bool {
    byte == b'\t' || (byte >= 0x20 && byte != 0x7f)
}
