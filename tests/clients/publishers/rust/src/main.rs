//! A service that publishes jobs with async-nats: it reads frames and results, and cancels.
//! Prints what happened as one JSON object.

use async_nats::{Client, ConnectOptions, HeaderMap, Request, Subscriber};
use futures_util::StreamExt;
use serde_json::{json, Value};
use std::error::Error;
use std::time::Duration;

type Outcome<T> = Result<T, Box<dyn Error>>;

const ENDS: [&str; 5] = ["done", "cancelled", "expired", "shed", "failed"];

struct Service {
    client: Client,
    tenant: String,
    frames: Subscriber,
}

impl Service {
    async fn publish(&self, id: &str, max_tokens: u64) -> Outcome<()> {
        let mut headers = HeaderMap::new();
        headers.insert("Content-Type", "application/json");
        headers.insert("Nats-Msg-Id", id);
        let job = json!({
            "request_id": id, "model": "demo", "prompt": "What is a lease?",
            "sampling": {"max_tokens": max_tokens, "ignore_eos": true, "seed": 1},
            "reply": self.tenant, "store_result": true,
        });
        let subject = format!("jobs.demo.free.{}", self.tenant);
        let jetstream = async_nats::jetstream::new(self.client.clone());
        let stored = jetstream.publish_with_headers(subject, headers, job.to_string().into());
        stored.await?.await?;
        Ok(())
    }

    async fn frame(&mut self, id: &str) -> Outcome<Value> {
        loop {
            let next = tokio::time::timeout(Duration::from_secs(30), self.frames.next()).await?;
            let message = next.ok_or("the subscription has ended")?;
            if message.subject.as_str() == format!("tok.{}.{id}", self.tenant) {
                return Ok(serde_json::from_slice(&message.payload)?);
            }
        }
    }

    async fn end(&mut self, id: &str) -> Outcome<(String, String)> {
        let mut text = String::new();
        loop {
            let frame = self.frame(id).await?;
            text += frame["text"].as_str().unwrap_or("");
            let kind = frame["type"].as_str().unwrap_or("").to_string();
            if ENDS.contains(&kind.as_str()) {
                return Ok((kind, text));
            }
        }
    }

    async fn ask(&self, subject: String) -> Outcome<Value> {
        let request = Request::new().timeout(Some(Duration::from_secs(2)));
        let answer = self.client.send_request(subject, request).await?;
        Ok(serde_json::from_slice(&answer.payload)?)
    }

    async fn result(&self, id: &str) -> Outcome<Value> {
        loop {
            let answer = self.ask(format!("ctl.result.{}.{id}", self.tenant)).await?;
            if answer["error"]["retryable"] != true {
                return Ok(answer);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Outcome<()> {
    let variable = |name: &str| std::env::var(name).expect(name);
    let tenant = variable("TENANT");
    let client = ConnectOptions::with_user_and_password(variable("NATS_USER"), variable("NATS_PASSWORD"))
        .custom_inbox_prefix(format!("_INBOX.service.{tenant}"))
        .connect(variable("NATS_URL"))
        .await?;
    let frames = client.subscribe(format!("tok.{tenant}.>")).await?;
    client.flush().await?;
    let mut service = Service { client, tenant: tenant.clone(), frames };

    service.publish("rust-1", 20).await?;
    let (end, text) = service.end("rust-1").await?;
    let asked = service.result("rust-1").await?;
    let jetstream = async_nats::jetstream::new(service.client.clone());
    let stream = jetstream.get_stream_no_info("RESULTS").await?;
    let found = stream.direct_get_last_for_subject(format!("results.{tenant}.rust-1")).await?;
    let stored: Value = serde_json::from_slice(&found.payload)?;

    service.publish("rust-2", 2000).await?;
    while service.frame("rust-2").await?["type"] != "delta" {}
    service.client.publish(format!("ctl.cancel.{tenant}.rust-2"), "".into()).await?;
    let (cancelled, _) = service.end("rust-2").await?;

    let unknown = service.ask(format!("ctl.result.{tenant}.never")).await?;
    let foreign = service.ask("ctl.result.shop.rust-1".to_string()).await;
    println!(
        "{}",
        json!({
            "end": end, "text": text, "asked": asked, "stored": stored,
            "cancelled": cancelled, "unknown": unknown, "foreign": foreign.is_ok(),
        })
    );
    Ok(())
}
