//! Code shared by FastCGI, SCGI and uwsgi. In all of them a request is a list of CGI parameters (RFC 3875 §4.1), and
//! the response is a CGI response ([`crate::http1::ResponseHeadParser::cgi`]).

use std::fmt;

/// A writer for the parameters of a request, in their order.
pub trait ParamsWriter {
    /// Appends a parameter. After an error the request cannot be sent.
    fn push(&mut self, name: &[u8], value: &[u8]) -> Result<(), UnwritableParams>;
}

/// Reason why a protocol cannot encode the parameters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UnwritableParams {
    /// A name or value contains NUL, which ends them in SCGI.
    Nul,
    /// One parameter, or all together, exceed the maximum length of the protocol.
    TooBig {
        /// Length in bytes.
        length: usize,
    },
}

impl fmt::Display for UnwritableParams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nul => f.write_str("a parameter holds a null character"),
            Self::TooBig { length } => write!(f, "request is too big: {length}"),
        }
    }
}

impl std::error::Error for UnwritableParams {}

/// Appends the parameter name for a header field: `HTTP_` and the field's name in capitals, with "_" for "-" (RFC 3875
/// §4.1.18). Two fields may result in the same name; that is why `underscores_in_headers` is off by default.
pub fn write_field_param(out: &mut Vec<u8>, field_name: &[u8]) {
    out.extend_from_slice(b"HTTP_");
    out.extend(field_name.iter().map(|byte| if *byte == b'-' { b'_' } else { byte.to_ascii_uppercase() }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_become_parameters() {
        let mut out = Vec::new();
        write_field_param(&mut out, b"X-Real_ip2");
        assert_eq!(out, b"HTTP_X_REAL_IP2");
    }
}
