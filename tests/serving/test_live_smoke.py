import httpx, time, pytest
pytestmark = pytest.mark.serve
def test_smoke(fake_app):
    c = httpx.Client(base_url=fake_app.url)
    for i in range(20):
        t0=time.time(); r=c.post("v1/completions", json={"model":"tiny","prompt":"Hello"}); print(r.status_code, (time.time()-t0)*1e3)
    print(r.text)
    print(fake_app.status(), fake_app.gateway_status())
    print(c.get("ready").text, c.get("nope").text, c.get("/nope").text)
    r=c.post("v1/completions", json={"model":"tiny","prompt":"Hello"}, headers={"x-request-disconnect-disabled":"?1"}); print(r.status_code,r.text,r.headers)
    r=c.post("v1/completions", json={"model":"tiny","prompt":"Hello"}, headers={"x-request-id":b"\xff"}); print(r.status_code,r.text)
