//! Verification of passwords against the hashes in password files.
//!
//! | begins with | is | made by |
//! |---|---|---|
//! | `$apr1$` | Apache's MD5 | htpasswd, `openssl passwd -apr1` |
//! | `$1$` | MD5 of crypt(3) | `openssl passwd -1` |
//! | `$5$`, `$6$` | SHA-256 and SHA-512 of crypt(3) | htpasswd, `openssl passwd -5`, `-6` |
//! | `$2a$`, `$2b$`, `$2x$`, `$2y$` | bcrypt | `htpasswd -B` |
//! | `$y$` | yescrypt | mkpasswd |
//! | `{PLAIN}`, `{SHA}`, `{SSHA}` | RFC 2307; the first is the password itself | slappasswd |
//! | anything else | DES of crypt(3), eight characters of the password | `htpasswd -d` |
//!
//! (<https://nginx.org/en/docs/http/ngx_http_auth_basic_module.html#auth_basic_user_file>)
//! Comparisons take constant time. An unknown or invalid form matches no password.

use md5::Digest;
use sha_crypt::PasswordVerifier;
use sha1::Sha1;
use subtle::ConstantTimeEq;

use super::des_crypt::des_crypt;
use super::md5_crypt::md5_crypt;
use crate::shared::base64;

/// Returns `true` if the password matches the stored one. Takes from a microsecond to seconds, depending on the form.
pub(super) fn is_right(password: &[u8], stored: &[u8]) -> bool {
    // crypt(3) would stop at the zero byte.
    if password.contains(&0) {
        return false;
    }
    let form = FORMS.iter().find_map(|(prefix, verify)| Some((stored.strip_prefix(*prefix)?, verify)));
    match form {
        Some((rest, verify)) => verify(password, rest, stored),
        None => is_right_des(password, stored),
    }
}

/// Verifies a password; the arguments are the password, the text behind the prefix, and the whole stored text.
type Verify = fn(&[u8], &[u8], &[u8]) -> bool;

const FORMS: &[(&[u8], Verify)] = &[
    (b"$apr1$", |password, rest, stored| is_right_md5(password, b"$apr1$", rest, stored)),
    (b"$1$", |password, rest, stored| is_right_md5(password, b"$1$", rest, stored)),
    (b"$5$", is_right_sha_crypt),
    (b"$6$", is_right_sha_crypt),
    (b"$2a$", is_right_bcrypt),
    (b"$2b$", is_right_bcrypt),
    (b"$2x$", is_right_bcrypt),
    (b"$2y$", is_right_bcrypt),
    (b"$y$", is_right_yescrypt),
    (b"{PLAIN}", |password, rest, _| is_equal(password, rest)),
    (b"{SHA}", is_right_sha1),
    (b"{SSHA}", is_right_salted_sha1),
];

fn is_equal(one: &[u8], other: &[u8]) -> bool {
    one.ct_eq(other).into()
}

fn is_right_md5(password: &[u8], magic: &[u8], rest: &[u8], stored: &[u8]) -> bool {
    is_equal(&md5_crypt(password, magic, rest), stored)
}

fn is_right_sha_crypt(password: &[u8], _: &[u8], stored: &[u8]) -> bool {
    str::from_utf8(stored).is_ok_and(|stored| sha_crypt::ShaCrypt::default().verify_password(password, stored).is_ok())
}

fn is_right_bcrypt(password: &[u8], _: &[u8], stored: &[u8]) -> bool {
    str::from_utf8(stored).is_ok_and(|stored| bcrypt::verify(password, stored).unwrap_or(false))
}

fn is_right_yescrypt(password: &[u8], _: &[u8], stored: &[u8]) -> bool {
    str::from_utf8(stored).is_ok_and(|stored| yescrypt::Yescrypt::default().verify_password(password, stored).is_ok())
}

fn is_right_sha1(password: &[u8], rest: &[u8], _: &[u8]) -> bool {
    let Some(stored) = base64::decode(rest) else { return false };
    is_equal(&Sha1::digest(password), &stored.collect::<Vec<u8>>())
}

fn is_right_salted_sha1(password: &[u8], rest: &[u8], _: &[u8]) -> bool {
    let Some(stored) = base64::decode(rest) else { return false };
    let stored: Vec<u8> = stored.collect();
    let Some((stored, salt)) = stored.split_at_checked(Sha1::output_size()) else { return false };
    is_equal(&Sha1::new().chain_update(password).chain_update(salt).finalize(), stored)
}

fn is_right_des(password: &[u8], stored: &[u8]) -> bool {
    let made = stored.first_chunk().and_then(|salt| des_crypt(password, *salt));
    made.is_some_and(|made| is_equal(&made, stored))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Output of htpasswd, openssl, mkpasswd, slappasswd and nginx's documentation for `password`.
    const STORED: &[&str] = &[
        "sa3tHJ3/KuYvI",
        "$1$salt$qJH7.N4xYta3aEG/dfqo/0",
        "$1$$I2o9Z7NcvQAKp7wyCTlia0",
        "$apr1$abcdefgh$FBwExRW4dCc8aL.OvjpIE1",
        "$apr1$salt$Xxd1irWT9ycqoYxGFn4cb.",
        "$5$saltstring$OH4IDuTlsuTYPdED1gsuiRMyTAwNlRWyA6Xr3I4/dQ5",
        "$5$rounds=1000$short$G6a7kCgkpoq2XWVJNOVxq6CFUfO7mHOsayZj/hiCfo2",
        "$6$rounds=1400$anotherlongsalts$\
         PAZqpKUKGek9w8oPgIGPxV0Y72OmDpdCthOX9H9O.5R1UbUeZcZS09hlVOfEnTt.66Pdgt7Jvf5Fcex6JIQox/",
        "$6$x$.7KcIn5.ZfkbYAJ0eR5aiXX.9cAoOEk.kCx3w6xY1EaxFjgMWuH6WyPufoidBlBiQ9OVWpzaDWwKtTA8cs5FF.",
        "$2y$05$abcdefghijklmnopqrstuuWG29KuyeAicPCJODk1zjyGvyQUU2awu",
        "$2a$04$abcdefghijklmnopqrstuughE8Ev8uGFaUgY2cNEySvxngrb/Jzdm",
        "$2b$04$abcdefghijklmnopqrstuughE8Ev8uGFaUgY2cNEySvxngrb/Jzdm",
        "$y$j75$abcdefgh$hycRI05iyPwUdPZDaw/SJaABdj2h8B1Bgxi1Z/4Xke0",
        "{PLAIN}password",
        "{SHA}W6ph5Mm5Pz8GgiULbPgzG37mj9g=",
        "{SSHA}yI6cZwQadOA1e+/f+T+H3eCQQhRzYWx0",
    ];

    #[test]
    fn the_right_password_is_right_and_no_other() {
        for stored in STORED {
            assert!(is_right(b"password", stored.as_bytes()), "{stored}");
            for wrong in [&b""[..], b"passwor", b"Password", b"password\0"] {
                assert!(!is_right(wrong, stored.as_bytes()), "{stored}");
            }
            let mut other = stored.as_bytes().to_vec();
            *other.last_mut().unwrap() ^= 4;
            assert!(!is_right(b"password", &other), "{stored}");
        }
    }

    #[test]
    fn broken_ones_are_never_right() {
        let broken = [
            "$1$",
            "$apr1$",
            "$5$",
            "$6$",
            "$2y$",
            "$y$",
            "{SHA}",
            "{SSHA}",
            "{SHA}Zm9vCg==",
            "{SSHA}Zm9vCg==",
            "{SHA}_____Mm5Pz8GgiULbPgzG37mj9g=",
            "$2y$99$",
            "$5$rounds=1$a$b",
            "$2y$05$é",
            "$6$\u{e9}$",
            "$y$j9T$$",
            "",
            "a",
            "$9$unknown",
            "*",
            "!!",
            "{plain}1",
            "é",
        ];
        for stored in broken {
            for password in [&b""[..], b"1", b"\xff"] {
                assert!(!is_right(password, stored.as_bytes()), "{stored}");
            }
        }
        assert!(is_right(b"", b"{PLAIN}"));
    }
}
