//! Fields of a certificate, in OpenSSL's text forms.

use std::fmt::Write;
use std::net::IpAddr;

use aws_lc_rs::digest;
use gale_base::http_date;
use x509_parser::asn1_rs::Tag;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::prelude::FromDer;
use x509_parser::time::ASN1Time;
use x509_parser::x509::{AttributeTypeAndValue, X509Name};

use super::load;

const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/// OpenSSL's short names of attributes in distinguished names.
const ATTRIBUTES: &[(&str, &str)] = &[
    ("2.5.4.3", "CN"),
    ("2.5.4.4", "SN"),
    ("2.5.4.5", "serialNumber"),
    ("2.5.4.6", "C"),
    ("2.5.4.7", "L"),
    ("2.5.4.8", "ST"),
    ("2.5.4.9", "street"),
    ("2.5.4.10", "O"),
    ("2.5.4.11", "OU"),
    ("2.5.4.12", "title"),
    ("2.5.4.13", "description"),
    ("2.5.4.17", "postalCode"),
    ("2.5.4.42", "GN"),
    ("2.5.4.43", "initials"),
    ("2.5.4.46", "dnQualifier"),
    ("2.5.4.65", "pseudonym"),
    ("2.5.4.97", "organizationIdentifier"),
    ("0.9.2342.19200300.100.1.1", "UID"),
    ("0.9.2342.19200300.100.1.25", "DC"),
    ("1.2.840.113549.1.9.1", "emailAddress"),
];

/// A parsed certificate.
pub struct Certificate<'c> {
    der: &'c [u8],
    parsed: X509Certificate<'c>,
}

impl<'c> Certificate<'c> {
    /// Applies `ask` to the last certificate of a PEM text. Returns `None` if none can be parsed.
    pub fn last_of_pem<T>(text: &[u8], ask: impl FnOnce(&Certificate<'_>) -> T) -> Option<T> {
        let chain = load::certificates(text).ok()?;
        Certificate::of(chain.last()?).as_ref().map(ask)
    }

    /// Parses a certificate; `None` if it is malformed.
    pub fn of(der: &'c [u8]) -> Option<Certificate<'c>> {
        let (_, parsed) = X509Certificate::from_der(der).ok()?;
        Some(Certificate { der, parsed })
    }

    /// The subject (RFC 2253): `CN=name,O=organisation`.
    pub fn subject(&self) -> String {
        name(self.parsed.subject())
    }

    /// The subject's common name, if it has one.
    pub fn common_name(&self) -> Option<String> {
        let name = self.parsed.subject().iter_common_name().next()?;
        name.as_str().ok().map(str::to_owned)
    }

    /// The issuer, in the same form.
    pub fn issuer(&self) -> String {
        name(self.parsed.issuer())
    }

    /// The subject in OpenSSL's older form: `/O=organisation/CN=name`.
    pub fn subject_legacy(&self) -> String {
        legacy_name(self.parsed.subject())
    }

    /// The issuer in OpenSSL's older form.
    pub fn issuer_legacy(&self) -> String {
        legacy_name(self.parsed.issuer())
    }

    /// The serial number in hexadecimal digits.
    pub fn serial(&self) -> String {
        let raw = self.parsed.raw_serial();
        let significant = raw.iter().position(|&byte| byte != 0).map_or(&[0][..], |first| &raw[first..]);
        hex(significant, true)
    }

    /// SHA-1 of the DER encoding, in hexadecimal digits.
    pub fn fingerprint(&self) -> String {
        hex(digest::digest(&digest::SHA1_FOR_LEGACY_USE_ONLY, self.der).as_ref(), false)
    }

    /// Start of validity: `Jan  2 03:04:05 2026 GMT`.
    pub fn valid_from(&self) -> String {
        time(&self.parsed.validity().not_before)
    }

    /// End of validity, in the same form.
    pub fn valid_to(&self) -> String {
        time(&self.parsed.validity().not_after)
    }

    /// Whole days from `now` to the end of validity; 0 after it.
    pub fn days_left(&self, now: u64) -> u64 {
        let end = u64::try_from(self.parsed.validity().not_after.timestamp()).unwrap_or(0);
        end.saturating_sub(now) / 86_400
    }

    /// Reason why the certificate is outside its validity at `now`; `None` if it is valid.
    pub fn why_invalid_at(&self, now: u64) -> Option<String> {
        let (begin, end) = self.validity();
        if now < begin {
            return Some(format!("is not valid before {}", self.valid_from()));
        }
        (now > end).then(|| format!("expired on {}", self.valid_to()))
    }

    /// Subject alternative names: `DNS:a.example,email:b@a.example,URI:spiffe://a/b,IP:192.0.2.1`. Commas, backslashes
    /// and bytes outside visible ASCII are written as `\2C` and so on, so every comma separates two names. `None` if
    /// there is no name of these kinds.
    pub fn alternative_names(&self) -> Option<String> {
        let names = self.parsed.subject_alternative_name().ok().flatten()?;
        let mut text = String::new();
        for name in &names.value.general_names {
            let (kind, value) = match name {
                GeneralName::DNSName(name) => ("DNS", name.as_bytes().to_vec()),
                GeneralName::RFC822Name(name) => ("email", name.as_bytes().to_vec()),
                GeneralName::URI(name) => ("URI", name.as_bytes().to_vec()),
                GeneralName::IPAddress(octets) => match address(octets) {
                    Some(address) => ("IP", address.to_string().into_bytes()),
                    None => continue,
                },
                _ => continue,
            };
            if !text.is_empty() {
                text.push(',');
            }
            text.push_str(kind);
            text.push(':');
            for byte in value {
                match byte {
                    b'!'..=b'~' if byte != b',' && byte != b'\\' => text.push(char::from(byte)),
                    _ => text.push_str(&format!("\\{byte:02X}")),
                }
            }
        }
        (!text.is_empty()).then_some(text)
    }

    /// The certificate in PEM.
    pub fn pem(&self) -> String {
        pem_of(self.der)
    }

    /// Start and end of validity, in seconds since 1970.
    pub fn validity(&self) -> (u64, u64) {
        let seconds = |time: &ASN1Time| u64::try_from(time.timestamp()).unwrap_or(0);
        let validity = self.parsed.validity();
        (seconds(&validity.not_before), seconds(&validity.not_after))
    }

    /// The issuer's common name, if it has one.
    pub fn issuer_common_name(&self) -> Option<String> {
        let name = self.parsed.issuer().iter_common_name().next()?;
        name.as_str().ok().map(str::to_owned)
    }

    /// Identifier for requests of renewal information (RFC 9773, section 4.1): the issuer's key and the serial number.
    pub(super) fn renewal_id(&self) -> Option<String> {
        let key = self.parsed.extensions().iter().find_map(|extension| match extension.parsed_extension() {
            ParsedExtension::AuthorityKeyIdentifier(identifier) => identifier.key_identifier.as_ref(),
            _ => None,
        })?;
        Some(format!("{}.{}", base64_url(key.0), base64_url(self.parsed.raw_serial())))
    }
}

/// IP address from the octets of an alternative name.
fn address(octets: &[u8]) -> Option<IpAddr> {
    let four = <[u8; 4]>::try_from(octets).map(IpAddr::from);
    four.or_else(|_| <[u8; 16]>::try_from(octets).map(IpAddr::from)).ok()
}

pub(super) fn pem_of(der: &[u8]) -> String {
    let mut pem = String::from("-----BEGIN CERTIFICATE-----\n");
    // A line is 64 digits.
    for line in der.chunks(48) {
        pem.push_str(&base64(line));
        pem.push('\n');
    }
    pem.push_str("-----END CERTIFICATE-----\n");
    pem
}

/// Base64 for URLs, without padding (RFC 4648, section 5).
pub fn base64_url(bytes: &[u8]) -> String {
    base64(bytes).trim_end_matches('=').replace('+', "-").replace('/', "_")
}

/// Decodes [`base64_url`]; padding is accepted, any other deviation is an error.
pub fn from_base64_url(text: &[u8]) -> Option<Vec<u8>> {
    let text = text.strip_suffix(b"==").or_else(|| text.strip_suffix(b"=")).unwrap_or(text);
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => Some(u32::from(byte - b'A')),
        b'a'..=b'z' => Some(u32::from(byte - b'a') + 26),
        b'0'..=b'9' => Some(u32::from(byte - b'0') + 52),
        b'-' => Some(62),
        b'_' => Some(63),
        _ => None,
    };
    let mut bytes = Vec::with_capacity(text.len() * 3 / 4);
    for group in text.chunks(4) {
        let mut bits = 0;
        for index in 0..4 {
            bits = bits << 6 | group.get(index).map_or(Some(0), |&byte| digit(byte))?;
        }
        let count = match group.len() {
            1 => return None,
            length => length - 1,
        };
        bytes.extend_from_slice(&bits.to_be_bytes()[1..1 + count]);
    }
    Some(bytes)
}

/// Base64 (RFC 4648, section 4).
pub fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let [first, second, third] = [0, 1, 2].map(|index| u32::from(group.get(index).copied().unwrap_or(0)));
        let bits = first << 16 | second << 8 | third;
        for index in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * index) & 0x3f) as usize];
            text.push(if index <= group.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

fn hex(bytes: &[u8], is_upper: bool) -> String {
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        // Writing to a string cannot fail.
        let _ = if is_upper { write!(text, "{byte:02X}") } else { write!(text, "{byte:02x}") };
    }
    text
}

fn time(time: &ASN1Time) -> String {
    let seconds = u64::try_from(time.timestamp()).unwrap_or(0);
    let date = http_date::date_of(seconds / 86_400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let month = MONTHS[date.month.clamp(1, 12) as usize - 1];
    format!("{month} {:2} {hour:02}:{minute:02}:{second:02} {} GMT", date.day, date.year)
}

/// OpenSSL's short name of an attribute, or its object identifier.
fn attribute(attribute: &AttributeTypeAndValue<'_>) -> Result<&'static str, String> {
    let number = attribute.attr_type().to_id_string();
    ATTRIBUTES.iter().find(|(known, _)| *known == number).map(|(_, name)| *name).ok_or(number)
}

/// Distinguished name as in RFC 2253: last part first.
fn name(name: &X509Name<'_>) -> String {
    let mut text = String::new();
    let parts: Vec<_> = name.iter_rdn().collect();
    for (index, part) in parts.iter().rev().enumerate() {
        let attributes: Vec<_> = part.iter().collect();
        for (number, own) in attributes.iter().rev().enumerate() {
            match (index, number) {
                (0, 0) => {}
                (_, 0) => text.push(','),
                _ => text.push('+'),
            }
            match attribute(own) {
                Ok(known) => {
                    text.push_str(known);
                    text.push('=');
                    escape(&value(own), &mut text);
                }
                // The value of an unknown attribute is shown as its encoding in hexadecimal digits.
                Err(number) => {
                    text.push_str(&number);
                    text.push('=');
                    text.push('#');
                    let value = own.attr_value();
                    text.push_str(&hex(&[value.tag().0 as u8, value.data.len().min(0x7f) as u8], true));
                    text.push_str(&hex(value.data, true));
                }
            }
        }
    }
    text
}

fn legacy_name(name: &X509Name<'_>) -> String {
    let mut text = String::new();
    for own in name.iter_attributes() {
        text.push('/');
        text.push_str(&attribute(own).map_or_else(|number| number, str::to_owned));
        text.push('=');
        for &byte in own.attr_value().data {
            match byte {
                b' '..=b'~' => text.push(char::from(byte)),
                _ => text.push_str(&format!("\\x{byte:02X}")),
            }
        }
    }
    text
}

/// The text of an attribute, in UTF-8.
fn value(own: &AttributeTypeAndValue<'_>) -> Vec<u8> {
    let value = own.attr_value();
    match value.tag() {
        Tag::BmpString => {
            let units = value.data.chunks_exact(2).map(|pair| u16::from_be_bytes([pair[0], pair[1]]));
            char::decode_utf16(units).map(|found| found.unwrap_or('\u{fffd}')).collect::<String>().into_bytes()
        }
        Tag::T61String => value.data.iter().map(|&byte| char::from(byte)).collect::<String>().into_bytes(),
        _ => value.data.to_vec(),
    }
}

/// Escapes by RFC 2253, section 2.4; as OpenSSL does, also everything outside ASCII.
fn escape(value: &[u8], out: &mut String) {
    for (index, &byte) in value.iter().enumerate() {
        let is_edge = index == 0 || index + 1 == value.len();
        match byte {
            b',' | b'+' | b'"' | b'\\' | b'<' | b'>' | b';' => out.extend(['\\', char::from(byte)]),
            b'#' if index == 0 => out.push_str("\\#"),
            b' ' if is_edge => out.push_str("\\ "),
            b' '..=b'~' => out.push(char::from(byte)),
            _ => out.push_str(&format!("\\{byte:02X}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DnType, DnValue, KeyPair, SanType, SerialNumber, date_time_ymd};

    use super::*;

    #[test]
    fn base64_for_urls_has_no_padding() {
        for bytes in [&b""[..], b"\xfb", b"\xfb\xff", b"\xfb\xff\xfe", b"four"] {
            let text = base64_url(bytes);
            assert!(!text.contains(['=', '+', '/']));
            assert_eq!(from_base64_url(text.as_bytes()).as_deref(), Some(bytes));
        }
        assert_eq!(from_base64_url(b"-_8="), Some(vec![0xfb, 0xff]));
        assert_eq!([from_base64_url(b"a"), from_base64_url(b"a+b/"), from_base64_url(b"a\nbc")], [None, None, None]);
    }

    #[test]
    fn forms_are_openssl_s() {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CountryName, "DE");
        params.distinguished_name.push(DnType::OrganizationName, "A, B + \"C\"");
        params.distinguished_name.push(DnType::CommonName, DnValue::Utf8String("na\u{ef}ve ".to_owned()));
        params.serial_number = Some(SerialNumber::from_slice(&[0x0a, 0xff]));
        params.not_before = date_time_ymd(2026, 1, 2);
        params.not_after = date_time_ymd(2046, 11, 23);
        let made = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        let own = Certificate::of(made.der()).unwrap();
        assert_eq!(own.subject(), "CN=na\\C3\\AFve\\ ,O=A\\, B \\+ \\\"C\\\",C=DE");
        assert_eq!(own.issuer_legacy(), "/C=DE/O=A, B + \"C\"/CN=na\\xC3\\xAFve ");
        assert_eq!((own.serial(), own.fingerprint().len()), ("0AFF".to_owned(), 40));
        assert_eq!(own.valid_from(), "Jan  2 00:00:00 2026 GMT");
        assert_eq!(own.valid_to(), "Nov 23 00:00:00 2046 GMT");
        let end = 2_426_544_000;
        assert_eq!([own.days_left(end - 86_400), own.days_left(end - 1), own.days_left(end + 1)], [1, 0, 0]);
        assert_eq!(own.pem(), made.pem().replace("\r\n", "\n"));
        assert!(Certificate::of(b"no certificate").is_none());
        assert_eq!(own.alternative_names(), None);
        let begin = 1_767_312_000;
        assert_eq!([begin, end].map(|now| own.why_invalid_at(now)), [None, None]);
        assert_eq!(own.why_invalid_at(begin - 1).unwrap(), "is not valid before Jan  2 00:00:00 2026 GMT");
        assert_eq!(own.why_invalid_at(end + 1).unwrap(), "expired on Nov 23 00:00:00 2046 GMT");
    }

    #[test]
    fn no_name_looks_like_two() {
        let text = |text: &str| text.to_owned().try_into().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.subject_alt_names = vec![
            SanType::DnsName(text("*.example.com")),
            SanType::IpAddress("192.0.2.1".parse().unwrap()),
            SanType::OtherName((vec![1, 2, 3], rcgen::OtherNameValue::Utf8String("other".to_owned()))),
            SanType::IpAddress("2001:db8::1".parse().unwrap()),
            SanType::Rfc822Name(text("a@example.com,DNS:b.example")),
            SanType::URI(text("spiffe://example.com/a\nb")),
        ];
        let made = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        assert_eq!(
            Certificate::of(made.der()).unwrap().alternative_names().unwrap(),
            "DNS:*.example.com,IP:192.0.2.1,IP:2001:db8::1,email:a@example.com\\2CDNS:b.example,\
             URI:spiffe://example.com/a\\0Ab"
        );
    }
}
