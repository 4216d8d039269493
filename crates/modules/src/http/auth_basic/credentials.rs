//! `Basic` credentials (RFC 7617), parsed as in nginx.

use crate::shared::base64;

pub(super) struct Credentials {
    text: Vec<u8>,
    /// Index of the colon behind the user name.
    colon: usize,
}

impl Credentials {
    /// Parses the value of an `Authorization` field. Returns `None` if it has another scheme, is invalid, or names no
    /// user.
    pub fn parse(value: &[u8]) -> Option<Credentials> {
        let text: Vec<u8> = decoded(value)?.collect();
        let colon = text.iter().position(|&byte| byte == b':').filter(|&colon| colon > 0)?;
        Some(Credentials { text, colon })
    }

    pub fn user(&self) -> &[u8] {
        &self.text[..self.colon]
    }

    pub fn password(&self) -> &[u8] {
        &self.text[self.colon + 1..]
    }
}

/// Appends the user name in an `Authorization` field. Returns `false`, and appends nothing, if there is none.
pub(in crate::http) fn append_user(value: &[u8], out: &mut Vec<u8>) -> bool {
    let Some(text) = decoded(value) else { return false };
    let start = out.len();
    // The password behind the colon is not decoded.
    for byte in text {
        match byte {
            b':' => return out.len() > start,
            byte => out.push(byte),
        }
    }
    out.truncate(start);
    false
}

fn decoded(value: &[u8]) -> Option<impl Iterator<Item = u8>> {
    const SCHEME: &[u8] = b"Basic ";
    let (scheme, encoded) = value.split_at_checked(SCHEME.len())?;
    if !scheme.eq_ignore_ascii_case(SCHEME) {
        return None;
    }
    let spaces = encoded.iter().take_while(|&&byte| byte == b' ').count();
    base64::decode(&encoded[spaces..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_is_the_part_before_the_colon() {
        let user = |value: &str| {
            let mut out = b"-".to_vec();
            let is_there = append_user(value.as_bytes(), &mut out);
            let parsed = Credentials::parse(value.as_bytes());
            assert_eq!(parsed.is_some(), is_there, "{value}");
            assert_eq!(parsed.map_or(&b""[..], |credentials| &out[1..1 + credentials.user().len()]), &out[1..]);
            is_there.then(|| String::from_utf8(out[1..].to_vec()).unwrap())
        };
        assert_eq!(user("Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ=="), Some("Aladdin".to_owned()));
        assert_eq!(user("basic   QWxhZGRpbjo="), Some("Aladdin".to_owned()));
        // No colon, an empty name, invalid base64, an impossible length, another scheme.
        for refused in ["Basic QWxhZGRpbg==", "Basic OnBhc3M=", "Basic QWx-", "Basic QWxhZ", "Bearer QTpC", "Basic", ""]
        {
            assert_eq!(user(refused), None, "{refused}");
        }
    }

    #[test]
    fn password_is_the_part_after_the_colon() {
        let password = |value: &str| Credentials::parse(value.as_bytes()).unwrap().password().to_vec();
        assert_eq!(password("Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ=="), b"open sesame");
        assert_eq!(password("Basic QWxhZGRpbjo="), b"");
        assert_eq!(password("Basic YTpiOmM="), b"b:c");
    }
}
