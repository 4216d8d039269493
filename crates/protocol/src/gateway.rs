//! What FastCGI, SCGI and uwsgi have in common: a request is a list of parameters as CGI has it (RFC 3875 §4.1), and
//! the response is that of CGI ([`crate::http1::ResponseHeadParser::cgi`]).

use std::fmt;

/// Where the parameters of a request are written to, in their order.
pub trait ParamsWriter {
    /// Adds a parameter. After an error the request cannot be sent.
    fn push(&mut self, name: &[u8], value: &[u8]) -> Result<(), UnwritableParams>;
}

/// Parameters that a protocol has no way to carry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UnwritableParams {
    /// A name or a value holds NUL, which ends them in SCGI.
    Nul,
    /// All of them together, or one of them, have more bytes than the protocol can say.
    TooBig {
        /// How many bytes there are.
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

/// Appends the name of the parameter that carries a header field: `HTTP_` and the field's name in capitals, with "_"
/// for "-" (RFC 3875 §4.1.18). Two fields may get the same name: `underscores_in_headers` is off for that reason.
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
