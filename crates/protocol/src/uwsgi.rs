//! uwsgi for the web server's side: a request is a packet of parameters, followed by the body.
//!
//! The response is a CGI response that ends with the connection. Invariant: the length field of a packet matches its
//! size.
//!
//! ```text
//! modifier1 | size (2) | modifier2 | name length (2) | name | value length (2) | value | ... |the body
//! ```
//!
//! Lengths are little-endian.

use crate::gateway::{ParamsWriter, UnwritableParams};

/// Maximum size of a packet without its first four bytes.
pub const PACKET_MAX: usize = u16::MAX as usize;

const HEADER_LENGTH: usize = 4;

/// Writes the parameters of a request.
#[derive(Debug)]
pub struct Params<'o> {
    out: &'o mut Vec<u8>,
    start: usize,
}

impl<'o> Params<'o> {
    /// Creates a writer that appends to `out`. The modifiers select the kind of request; both are usually 0, for a WSGI
    /// request.
    pub fn new(out: &'o mut Vec<u8>, modifier1: u8, modifier2: u8) -> Self {
        let start = out.len();
        out.extend_from_slice(&[modifier1, 0, 0, modifier2]);
        Self { out, start }
    }

    /// Appends raw bytes to the packet, after all parameters: nginx's `uwsgi_string`.
    pub fn push_raw(&mut self, text: &[u8]) -> Result<(), UnwritableParams> {
        self.check_room(text.len())?;
        self.out.extend_from_slice(text);
        Ok(())
    }

    /// Ends the parameters; without it the request is incomplete. The body follows.
    pub fn finish(self) {
        let [low, high] = (self.length() as u16).to_le_bytes();
        self.out[self.start + 1] = low;
        self.out[self.start + 2] = high;
    }

    fn length(&self) -> usize {
        self.out.len() - self.start - HEADER_LENGTH
    }

    fn check_room(&self, added: usize) -> Result<(), UnwritableParams> {
        let length = self.length().saturating_add(added);
        if length > PACKET_MAX { Err(UnwritableParams::TooBig { length }) } else { Ok(()) }
    }
}

impl ParamsWriter for Params<'_> {
    fn push(&mut self, name: &[u8], value: &[u8]) -> Result<(), UnwritableParams> {
        self.check_room(name.len().saturating_add(value.len()).saturating_add(4))?;
        for text in [name, value] {
            self.out.extend_from_slice(&(text.len() as u16).to_le_bytes());
            self.out.extend_from_slice(text);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_packets_with_little_endian_lengths() {
        let mut out = b"before".to_vec();
        let mut params = Params::new(&mut out, 5, 7);
        params.push(b"A", &[b'x'; 258]).unwrap();
        params.push(b"EMPTY", b"").unwrap();
        params.push_raw(b"raw").unwrap();
        params.finish();
        let mut expected = b"before\x05\x13\x01\x07\x01\0A\x02\x01".to_vec();
        expected.extend_from_slice(&[b'x'; 258]);
        expected.extend_from_slice(b"\x05\0EMPTY\0\0raw");
        assert_eq!(out, expected);
    }

    #[test]
    fn packets_hold_64_kib_less_one_byte() {
        let mut out = Vec::new();
        let mut params = Params::new(&mut out, 0, 0);
        let too_big = vec![b'x'; PACKET_MAX - 4];
        assert_eq!(params.push(b"A", &too_big), Err(UnwritableParams::TooBig { length: PACKET_MAX + 1 }));
        params.push(b"A", &too_big[1..]).unwrap();
        assert_eq!(params.push(b"", b""), Err(UnwritableParams::TooBig { length: PACKET_MAX + 4 }));
        assert_eq!(params.push_raw(b"x"), Err(UnwritableParams::TooBig { length: PACKET_MAX + 1 }));
        params.push_raw(b"").unwrap();
        params.finish();
        assert_eq!((out.len(), &out[..4]), (PACKET_MAX + 4, &[0, 0xff, 0xff, 0][..]));
        let message = UnwritableParams::TooBig { length: 65536 }.to_string();
        assert_eq!(format!("uwsgi {message}"), "uwsgi request is too big: 65536");
    }
}
