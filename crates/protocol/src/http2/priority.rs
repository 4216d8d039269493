//! Extensible priorities: RFC 9218 §4.
//!
//! A priority is only a hint, so invalid parts are ignored and never an error.

/// Urgency of a response, and whether its pieces are useful on their own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Priority {
    /// Urgency, from 0 (most urgent) to 7: RFC 9218 §4.1.
    pub urgency: u8,
    /// `true` if the response may be interleaved with others: RFC 9218 §4.2.
    pub incremental: bool,
}

impl Default for Priority {
    fn default() -> Self {
        Self { urgency: 3, incremental: false }
    }
}

/// The lowest urgency.
pub const URGENCY_MAX: u8 = 7;

impl Priority {
    /// Parses the field `priority` or the value of PRIORITY_UPDATE, such as `u=1, i`: a dictionary (RFC 9651 §3.2) of
    /// which only the members `u` and `i` are used. A member that is missing or has another type keeps its default.
    pub fn parse(value: &[u8]) -> Self {
        let mut priority = Self::default();
        for member in value.split(|&byte| byte == b',') {
            let member = member.trim_ascii();
            let member = &member[..memchr::memchr(b';', member).unwrap_or(member.len())];
            match member.trim_ascii_end() {
                [b'u', b'=', digit @ b'0'..=b'7'] => priority.urgency = digit - b'0',
                b"i" | b"i=?1" => priority.incremental = true,
                b"i=?0" => priority.incremental = false,
                _ => {}
            }
        }
        priority
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_understood_and_the_rest_is_passed_over() {
        for (value, urgency, incremental) in [
            ("", 3, false),
            ("u=1, i", 1, true),
            ("i,u=7", 7, true),
            ("u=5;x=1 ,\ti;y", 5, true),
            ("u=2,u=4", 4, false),
            ("i, i=?0", 3, false),
            ("u=8", 3, false),
            ("u=-1, u=\"2\", U=1, i=1, x", 3, false),
            (",,,=", 3, false),
        ] {
            assert_eq!(Priority::parse(value.as_bytes()), Priority { urgency, incremental }, "{value}");
        }
    }
}
