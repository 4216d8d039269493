//! SCGI for the web server's side: a request is a netstring of parameters, followed by the body.
//!
//! The response is a CGI response that ends with the connection. Invariant: a parameter cannot be parsed as two.
//!
//! ```text
//! 70:CONTENT_LENGTH 0 27 0 SCGI 0 1 0 REQUEST_METHOD 0 POST 0 ... ,the body
//! ```

use crate::gateway::{ParamsWriter, UnwritableParams};
use crate::http1::response::write_decimal;

/// Writes the parameters of a request.
#[derive(Debug)]
pub struct Params<'o> {
    out: &'o mut Vec<u8>,
    start: usize,
}

impl<'o> Params<'o> {
    /// Creates a writer that appends to `out`, beginning with the length of the body, which must be the first
    /// parameter. The caller adds the required parameter `SCGI` with the value 1, since nginx has it in its file
    /// `scgi_params`.
    pub fn new(out: &'o mut Vec<u8>, content_length: u64) -> Self {
        let start = out.len();
        out.extend_from_slice(b"CONTENT_LENGTH\0");
        write_decimal(out, content_length);
        out.push(0);
        Self { out, start }
    }

    /// Ends the parameters; without it the request is incomplete. The body follows.
    pub fn finish(self) {
        let mut length = Vec::with_capacity(21);
        write_decimal(&mut length, (self.out.len() - self.start) as u64);
        length.push(b':');
        self.out.splice(self.start..self.start, length);
        self.out.push(b',');
    }
}

impl ParamsWriter for Params<'_> {
    fn push(&mut self, name: &[u8], value: &[u8]) -> Result<(), UnwritableParams> {
        if memchr::memchr(0, name).or(memchr::memchr(0, value)).is_some() {
            return Err(UnwritableParams::Nul);
        }
        for text in [name, value] {
            self.out.extend_from_slice(text);
            self.out.push(0);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_netstrings() {
        let mut out = b"before".to_vec();
        let mut params = Params::new(&mut out, 27);
        params.push(b"SCGI", b"1").unwrap();
        params.push(b"REQUEST_METHOD", b"POST").unwrap();
        params.push(b"REQUEST_URI", b"/deepthought").unwrap();
        params.push(b"EMPTY", b"").unwrap();
        params.finish();
        let expected: &[u8] = b"before77:CONTENT_LENGTH\x0027\0SCGI\x001\0REQUEST_METHOD\0POST\0\
                                REQUEST_URI\0/deepthought\0EMPTY\0\0,";
        assert_eq!(out, expected);

        let mut out = Vec::new();
        Params::new(&mut out, u64::MAX).finish();
        assert_eq!(out, b"36:CONTENT_LENGTH\x0018446744073709551615\0,");
    }

    #[test]
    fn null_characters_are_refused() {
        let mut out = Vec::new();
        let mut params = Params::new(&mut out, 0);
        assert_eq!(params.push(b"A\0", b"b"), Err(UnwritableParams::Nul));
        assert_eq!(params.push(b"A", b"\0CONTENT_LENGTH\x005"), Err(UnwritableParams::Nul));
        params.push(b"A", b"b").unwrap();
        params.finish();
        assert_eq!(out, b"21:CONTENT_LENGTH\x000\0A\0b\0,");
    }
}
