//! Signatures of requests: JSON Web Signatures (RFC 7515) in flattened form, as in RFC 8555, section 6.2. Signing with
//! a long RSA key takes milliseconds, so it must not run on an event loop.

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_FIXED_SIGNING, ECDSA_P384_SHA384_FIXED_SIGNING, ECDSA_P521_SHA512_FIXED_SIGNING, EcdsaKeyPair,
    EcdsaSigningAlgorithm, KeyPair, RSA_PKCS1_SHA256, RsaKeyPair,
};
use aws_lc_rs::{digest, hmac};
use gale_tls::{base64_url, keys};
use serde_json::{Value, json};

/// Identifies the sender of a request to the issuer.
pub(super) enum Identity<'k> {
    /// The URL of the account.
    Account(&'k str),
    /// The public key, before there is an account.
    Key,
}

/// The key of an account.
pub(super) struct AccountKey {
    signer: Signer,
    jwk: Value,
    thumbprint: String,
}

enum Signer {
    Ecdsa(EcdsaKeyPair, &'static str),
    Rsa(Box<RsaKeyPair>),
}

/// Algorithms of RFC 7518, section 3.4, with their curves and the length of a coordinate.
const CURVES: &[(&EcdsaSigningAlgorithm, &str, &str, usize)] = &[
    (&ECDSA_P256_SHA256_FIXED_SIGNING, "ES256", "P-256", 32),
    (&ECDSA_P384_SHA384_FIXED_SIGNING, "ES384", "P-384", 48),
    (&ECDSA_P521_SHA512_FIXED_SIGNING, "ES512", "P-521", 66),
];

impl AccountKey {
    /// Parses a PEM key.
    ///
    /// # Errors
    /// The text is not a key, or issuers do not accept its kind.
    pub fn of_pem(pem: &[u8]) -> Result<AccountKey, String> {
        let der = keys::private_key_der(pem)?;
        for &(algorithm, name, curve, length) in CURVES {
            let pair = EcdsaKeyPair::from_pkcs8(algorithm, &der)
                .or_else(|_| EcdsaKeyPair::from_private_key_der(algorithm, &der));
            let Ok(pair) = pair else { continue };
            // An uncompressed point.
            let (x, y) = match pair.public_key().as_ref().split_first() {
                Some((4, point)) if point.len() == 2 * length => point.split_at(length),
                _ => continue,
            };
            let (x, y) = (base64_url(x), base64_url(y));
            // The hash needs the members in this order (RFC 7638, section 3.2).
            let text = format!(r#"{{"crv":"{curve}","kty":"EC","x":"{x}","y":"{y}"}}"#);
            return Ok(AccountKey::of(Signer::Ecdsa(pair, name), &text));
        }
        let pair = RsaKeyPair::from_pkcs8(&der).or_else(|_| RsaKeyPair::from_der(&der));
        let pair = pair.map_err(|_| "the key is neither ECDSA nor RSA".to_owned())?;
        let (modulus, exponent) = rsa_numbers(pair.public_key().as_ref()).ok_or("the key cannot be read")?;
        let text = format!(r#"{{"e":"{}","kty":"RSA","n":"{}"}}"#, base64_url(exponent), base64_url(modulus));
        Ok(AccountKey::of(Signer::Rsa(Box::new(pair)), &text))
    }

    fn of(signer: Signer, jwk: &str) -> AccountKey {
        let thumbprint = base64_url(digest::digest(&digest::SHA256, jwk.as_bytes()).as_ref());
        let jwk = serde_json::from_str(jwk).expect("it was just written");
        AccountKey { signer, jwk, thumbprint }
    }

    /// Returns the hash of the public key (RFC 7638).
    pub fn thumbprint(&self) -> &str {
        &self.thumbprint
    }

    /// Signs a request to this URL. Without a payload the request fetches the resource.
    ///
    /// # Errors
    /// The key cannot sign.
    pub fn sign(
        &self,
        identity: &Identity<'_>,
        nonce: &str,
        url: &str,
        payload: Option<&Value>,
    ) -> Result<String, String> {
        let mut protected = json!({ "alg": self.algorithm(), "nonce": nonce, "url": url });
        match identity {
            Identity::Account(account) => protected["kid"] = json!(account),
            Identity::Key => protected["jwk"] = self.jwk.clone(),
        }
        let payload = payload.map_or(String::new(), Value::to_string);
        flattened(&protected, &payload, |input| self.signature(input))
    }

    /// Returns the object that binds an account known to the issuer by other means to this key (RFC 8555, section
    /// 7.3.4).
    ///
    /// # Errors
    /// None in practice.
    pub fn bind(&self, kid: &str, mac_key: &[u8], url: &str) -> Result<Value, String> {
        let protected = json!({ "alg": "HS256", "kid": kid, "url": url });
        let key = hmac::Key::new(hmac::HMAC_SHA256, mac_key);
        let text = flattened(&protected, &self.jwk.to_string(), |input| Ok(hmac::sign(&key, input).as_ref().to_vec()))?;
        serde_json::from_str(&text).map_err(|error| error.to_string())
    }

    fn algorithm(&self) -> &'static str {
        match &self.signer {
            Signer::Ecdsa(_, name) => name,
            Signer::Rsa(_) => "RS256",
        }
    }

    fn signature(&self, input: &[u8]) -> Result<Vec<u8>, String> {
        let random = SystemRandom::new();
        let failed = |_| "the account's key cannot sign".to_owned();
        match &self.signer {
            Signer::Ecdsa(pair, _) => pair.sign(&random, input).map(|signed| signed.as_ref().to_vec()).map_err(failed),
            Signer::Rsa(pair) => {
                let mut signature = vec![0; pair.public_modulus_len()];
                pair.sign(&RSA_PKCS1_SHA256, &random, input, &mut signature).map_err(failed)?;
                Ok(signature)
            }
        }
    }
}

fn flattened(
    protected: &Value,
    payload: &str,
    sign: impl FnOnce(&[u8]) -> Result<Vec<u8>, String>,
) -> Result<String, String> {
    let (protected, payload) = (base64_url(protected.to_string().as_bytes()), base64_url(payload.as_bytes()));
    let signature = sign(format!("{protected}.{payload}").as_bytes())?;
    Ok(json!({ "protected": protected, "payload": payload, "signature": base64_url(&signature) }).to_string())
}

/// Returns the modulus and the exponent of an `RSAPublicKey` (RFC 8017, appendix A.1.1), without leading zeros.
fn rsa_numbers(der: &[u8]) -> Option<(&[u8], &[u8])> {
    let (numbers, _) = element(der, 0x30)?;
    let (modulus, rest) = element(numbers, 0x02)?;
    let (exponent, _) = element(rest, 0x02)?;
    let bare = |number: &'_ [u8]| number.iter().position(|&byte| byte != 0).unwrap_or(0);
    Some((&modulus[bare(modulus)..], &exponent[bare(exponent)..]))
}

/// Returns the contents of a DER element with this tag, and the bytes behind it.
fn element(der: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (&first, rest) = der.split_first()?;
    let (&length, rest) = rest.split_first().filter(|_| first == tag)?;
    let (length, rest) = match length {
        0..=0x7f => (usize::from(length), rest),
        0x81..=0x84 => {
            let (digits, rest) = rest.split_at_checked(usize::from(length & 0x7f))?;
            (digits.iter().fold(0, |length, &digit| length << 8 | usize::from(digit)), rest)
        }
        _ => return None,
    };
    rest.split_at_checked(length)
}

#[cfg(test)]
mod tests {
    use aws_lc_rs::signature::{
        ECDSA_P256_SHA256_FIXED, RSA_PKCS1_2048_8192_SHA256, RsaPublicKeyComponents, UnparsedPublicKey,
    };
    use gale_tls::from_base64_url;
    use gale_tls::keys::{KeyKind, generate_key};

    use super::*;

    fn part(jws: &Value, name: &str) -> Vec<u8> {
        from_base64_url(jws[name].as_str().unwrap().as_bytes()).unwrap()
    }

    #[test]
    fn signatures_verify_with_the_key_that_they_show() {
        for kind in [KeyKind::Ecdsa256, KeyKind::Ecdsa384, KeyKind::Ecdsa521, KeyKind::Rsa2048] {
            let key = AccountKey::of_pem(generate_key(kind).unwrap().as_bytes()).unwrap();
            let signed = key.sign(&Identity::Key, "n", "https://a/", Some(&json!({"a": 1}))).unwrap();
            let jws: Value = serde_json::from_str(&signed).unwrap();
            let protected: Value = serde_json::from_slice(&part(&jws, "protected")).unwrap();
            assert_eq!((&protected["nonce"], &protected["url"]), (&json!("n"), &json!("https://a/")));
            assert_eq!(part(&jws, "payload"), br#"{"a":1}"#);
            let input = format!("{}.{}", jws["protected"].as_str().unwrap(), jws["payload"].as_str().unwrap());
            let (signature, jwk) = (part(&jws, "signature"), &protected["jwk"]);
            match kind {
                KeyKind::Ecdsa256 => {
                    let point = [&[4], &part(jwk, "x")[..], &part(jwk, "y")[..]].concat();
                    let public = UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, point);
                    public.verify(input.as_bytes(), &signature).unwrap();
                }
                KeyKind::Rsa2048 => {
                    let public = RsaPublicKeyComponents { n: part(jwk, "n"), e: part(jwk, "e") };
                    public.verify(&RSA_PKCS1_2048_8192_SHA256, input.as_bytes(), &signature).unwrap();
                }
                _ => assert!(signature.len() == 96 || signature.len() == 132),
            }
            assert_eq!(key.thumbprint().len(), 43);
        }
        assert!(AccountKey::of_pem(b"nothing").is_err());
    }

    #[test]
    fn thumbprint_is_that_of_the_standard() {
        // RFC 7638, section 3.1
        let jwk = concat!(
            r#"{"e":"AQAB","kty":"RSA","n":"0vx7agoebGcQSuuPiLJXZptN9nndrQmbXEps2aiAFbWhM78LhWx4cbbfAAtVT86zwu1RK7aPF"#,
            r#"FxuhDR1L6tSoc_BJECPebWKRXjBZCiFV4n3oknjhMstn64tZ_2W-5JsGY4Hc5n9yBXArwl93lqt7_RN5w6Cf0h4QyQ5v-65YGjQR0_"#,
            r#"FDW2QvzqY368QQMicAtaSqzs8KJZgnYb9c7d0zgdAZHzu6qMQvRL5hajrn1n91CbOpbISD08qNLyrdkt-bFTWhAI4vMQFh6WeZu0fM"#,
            r#"4lFd2NcRwr3XPksINHaQ-G_xBniIqbw0Ls1jF44-csFCur-kEgU8awapJzKnqDKgw"}"#
        );
        let hash = digest::digest(&digest::SHA256, jwk.as_bytes());
        assert_eq!(base64_url(hash.as_ref()), "NzbLsXh8uDCcd-6MNwXF4W_7noWXFZAfHkxZsRGC9Xs");
    }

    #[test]
    fn bindings_are_made_with_the_issuer_s_key() {
        let key = AccountKey::of_pem(generate_key(KeyKind::Ecdsa256).unwrap().as_bytes()).unwrap();
        let bound = key.bind("kid-1", b"secret", "https://a/new").unwrap();
        let protected: Value = serde_json::from_slice(&part(&bound, "protected")).unwrap();
        assert_eq!(protected, json!({ "alg": "HS256", "kid": "kid-1", "url": "https://a/new" }));
        let input = format!("{}.{}", bound["protected"].as_str().unwrap(), bound["payload"].as_str().unwrap());
        let mac_key = hmac::Key::new(hmac::HMAC_SHA256, b"secret");
        hmac::verify(&mac_key, input.as_bytes(), &part(&bound, "signature")).unwrap();
    }
}
